"""The front door: parses, calls one step, prints. Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from enum import Enum
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

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local folder, config.json or Hub id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class Form(str, Enum):
    """How a reduced model is written."""

    auto = "auto"
    stock = "stock"
    per_layer = "per-layer"


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
    context: Annotated[int, typer.Option(help="Tokens in each sequence.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8: what the cache holds.")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Print parameters, KV cache and FLOPs of a model, layer by layer, without loading its weights."""
    _quiet()
    from headwise.report.costs import print_costs  # noqa: PLC0415 - torch is only imported when a command needs it
    from headwise.steps.cost import report_cost  # noqa: PLC0415

    report = report_cost(model, plan, context, batch, dtype)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
    else:
        print_costs(report.cost, report.before, report.cost_after, report.after, report.kept)


@app.command()
def compress(
    model: Model,
    plan: Annotated[Path, typer.Option(help="What to keep of each layer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")],
    form: Annotated[
        Form, typer.Option("--format", help="stock: no custom code; per-layer: any plan; auto: stock if possible.")
    ] = Form.auto,
    as_json: AsJson = False,
) -> None:
    """Cut a model to a plan by its weights alone (joint truncated SVD, the papers' way) and save it, checked."""
    _quiet()
    from headwise.steps.compress import compress as run  # noqa: PLC0415

    command = shlex.join(["headwise", *sys.argv[1:]])
    found = run(model, plan, output, form.value, command)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{output}: {found['class']}, reopened in a fresh process with the same outputs.")


@app.command()
def demo() -> None:
    """Open SmolLM2-135M from its PyPI wheel, print what it costs, and let it finish a sentence."""
    _quiet()
    typer.echo("Opening SmolLM2-135M-Instruct (converted once, then kept in your cache folder) ...", err=True)
    from headwise.steps.demo import demo_model  # noqa: PLC0415

    folder = str(demo_model())
    cost(folder, context=8192, batch=1, dtype="bf16")
    from headwise.steps.generate import continue_text  # noqa: PLC0415

    typer.echo()
    typer.echo(continue_text(folder, "The capital of France is Paris, and the capital of Germany is"))


def _quiet() -> None:
    """Keep transformers' own remarks and progress bars away from the user."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    """Run the command line: 0 done, 1 failed, 2 wrong call."""
    try:
        app()
    except InputError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("stopped.", 1)
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"headwise: {sentence}", err=True)
    sys.exit(code)
