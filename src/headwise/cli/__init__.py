"""The front door: parses, calls one step, prints. Results on stdout, everything else on stderr."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise import __version__
from headwise.files.errors import Failed, InputError
from headwise.files.writing import check_file, check_writable
from headwise.records.healing import Stage, Train
from headwise.records.text import TextFormat
from headwise.records.training import Precision

if TYPE_CHECKING:
    from headwise.records.budget import Budget
    from headwise.report.papers import Row

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How many attention heads, how wide and how deep a Transformer needs to be, and that model.",
    epilog="Example: headwise cost HuggingFaceTB/SmolLM2-135M --context 8192",
)

INTERRUPTED = 130
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local folder, config.json or Hub id.")]
Text = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Text to measure on, - for standard input; .jsonl with messages or text in each line; may be given "
        "several times. By default prose that comes with headwise, and dialogues for models that chat.",
    ),
]
Form = Annotated[
    TextFormat,
    typer.Option(
        "--text-format", help="lines: each line is an example of its own; auto: lines if each is one long word."
    ),
]
AcceptText = Annotated[
    bool, typer.Option("--accept-text", help="Even if a fifth of its tokens are unknown, padding or repeated.")
]
Window = Annotated[
    int | None,
    typer.Option("--context", help="Tokens in a window; by default what the model was made for, up to 4096."),
]
Inputs = Annotated[
    Path | None,
    typer.Option(help="For models that do not read text: a folder of pictures, or .npz with the model's inputs."),
]
Tokens = Annotated[int, typer.Option(help="Tokens to measure on.")]
KeepParameters = Annotated[
    float | None, typer.Option(help="Share of the attention parameters to keep, for models without a cache.")
]
KvBytes = Annotated[int | None, typer.Option(help="Bytes one token may take in the KV cache.")]
Fit = Annotated[
    str | None, typer.Option(help='Memory for weights and KV cache, tokens and sequences in it: "8GB at 32k x 4".')
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let a tokenizer or image processor run code that comes with it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Data = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help="Text in UTF-8, or .npz with pixel_values and labels for vit; may be given several times.",
    ),
]
TrainTokens = Annotated[
    str | None,
    typer.Option(metavar="N", help="Tokens to learn from, as 20M; by default once through the data."),
]
Words = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Tokenizer to use; by default one is learnt from the data.")
]
TrainContext = Annotated[int | None, typer.Option(help="Tokens in a window; by default the plan's context.")]
TrainBatch = Annotated[int, typer.Option(help="Windows (pictures) that one process takes at once.")]
Accumulate = Annotated[int, typer.Option(help="Batches that make one step.")]
TrainRate = Annotated[float | None, typer.Option(help="Learning rate; by default what suits the size.")]
Tracker = Annotated[
    str | None, typer.Option(metavar="TRACKER", help="tensorboard, wandb, trackio, ...: see Accelerate.")
]
Evaluations = Annotated[int, typer.Option(help="Times to measure on held-out data.")]
InNumbers = Annotated[Precision, typer.Option(help="auto: bf16 where the machine computes in it.")]
Where = Literal["local", "ray"]


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
    text: Text = None,
    inputs: Inputs = None,
    tokens: Tokens = 8192,
    context: Window = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths to look at maps at; by default 64 to 1024 as far as the model goes.")
    ] = None,
    text_format: Form = "auto",
    accept_text: AcceptText = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the results; by default headwise-MODEL.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the labels the model draws for itself.")] = 0,
    trust_remote_code: Trust = False,
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
            model,
            folder,
            texts=text or (),
            inputs=inputs,
            tokens=tokens,
            context=context,
            lengths=wanted,
            text_format=text_format,
            accept_text=accept_text,
            seed=seed,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    _say(profile.notes)
    if as_json:
        typer.echo((folder / PROFILE).read_text(encoding="utf-8").rstrip())
    else:
        print_profile(profile)
        typer.echo(f"\n{folder / PROFILE}\n{folder / PAGE}  <- open in a browser")


@app.command()
def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE|MODEL", help="profile.json, the folder inspect wrote, or a model that is measured first."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan to write.")] = Path("plan.json"),
    keep_kv: Annotated[float | None, typer.Option(help="Share of the KV cache to keep, 0 to 1.")] = None,
    keep_attention_params: KeepParameters = None,
    kv_bytes_per_token: KvBytes = None,
    fit: Fit = None,
    max_damage: Annotated[
        str | None,
        typer.Option(
            help="The smallest model that measures at most so much worse: 2% more perplexity, or nats such as 0.02. "
            "Builds and runs about six models."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure on: a MODEL, or --max-damage, which by default takes what the profile held out.",
        ),
    ] = None,
    text_format: Form = "auto",
    accept_text: AcceptText = False,
    multiple_of: Annotated[int, typer.Option(help="Widths are multiples of this.")] = 8,
    protect: Annotated[
        str | None, typer.Option(metavar="LAYERS", help='Layers that stay whole, as in "0,1,28-29".')
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="One width and one set of RoPE pairs for all layers, for stock formats.")
    ] = False,
    context: Annotated[int | None, typer.Option(help="Tokens in the cache, for models with sliding windows.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8: what bytes are counted in.")] = "bf16",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Choose heads and widths for every layer that answer one budget where it is felt least.

    From a profile this takes a second. A model is measured first, into the folder headwise-MODEL-statistics.
    """
    from headwise.report.plans import print_plan
    from headwise.steps.plan import make_plan, read_budget, read_layers

    budgets = (keep_kv, keep_attention_params, kv_bytes_per_token, fit)
    budget = None
    if max_damage is None or any(value is not None for value in budgets):
        budget = read_budget(keep_kv, keep_attention_params, kv_bytes_per_token, fit, context, dtype, max_damage)
    protected = frozenset() if protect is None else read_layers(protect)
    file = None if dry_run else output
    if file is not None:
        check_file(file)
    folder = _profile_of(source, text, text_format, accept_text, trust_remote_code)
    if budget is not None:
        made, measured = make_plan(folder, file, budget, multiple=multiple_of, protect=protected, uniform=uniform)
    else:
        with _importing():
            from headwise.steps.search import plan_within, read_bound
        with _progress() as progress:
            bound = read_bound(max_damage or "")
            made, measured = plan_within(
                folder,
                file,
                bound,
                texts=() if _is_model(source) else text or (),
                text_format=text_format,
                accept_text=accept_text,
                multiple=multiple_of,
                protect=protected,
                uniform=uniform,
                context=context,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
    if as_json:
        typer.echo(made.text())
        return
    print_plan(made, measured)
    if not dry_run:
        typer.echo(f"\n{output}")


@app.command()
def compress(
    model: Model,
    plan: Annotated[Path, typer.Option(help="What to keep of each layer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")],
    form: Annotated[
        Literal["auto", "stock", "per-layer"],
        typer.Option("--format", help="stock: no custom code; per-layer: any plan; auto: stock if possible."),
    ] = "auto",
    method: Annotated[
        Literal["auto", "weighted", "token-weighted", "svd"],
        typer.Option(
            help="weighted: along the directions the loss feels; token-weighted: by second moments of tokens; svd: by "
            "the weights alone, the papers' way; auto: weighted if there is a profile."
        ),
    ] = "auto",
    refit: Annotated[
        str | None,
        typer.Option(
            metavar="PIECES",
            help="What to fit to the whole model afterwards: queries,outputs (by default, with weighted), temperature, "
            "or none.",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Folder of the profile, if it has moved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut a model to a plan and save it, checked: along what its profile measured, else by its weights alone."""
    with _importing():
        from headwise.steps.compress import compress as run
        from headwise.steps.compress import read_pieces

    command = shlex.join(["headwise", *sys.argv[1:]])
    with _progress() as progress:
        pieces = None if refit is None else read_pieces(refit)
        found = run(model, plan, output, form, command, method, profile, pieces, progress)
    _say(found["notes"])
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        ways = {"weighted": "along measured directions", "token-weighted": "by second moments of tokens"}
        how = ways.get(found["method"], "by the weights alone")
        fitted = f", {' and '.join(found['refit'])} refitted" if found["refit"] else ""
        if found["cut"] is not None and not found["refit"]:
            fitted = ", not refitted (that did not help on held-out text)"
        typer.echo(f"{output}: {found['class']}, cut {how}{fitted}, reopened in a fresh process with the same outputs.")


@app.command()
def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Local folders or Hub ids; all are compared with the first.")
    ],
    text: Text = None,
    inputs: Inputs = None,
    labels: Annotated[
        Path | None, typer.Option(help="For models that classify text: a file of label, tab, text in each line.")
    ] = None,
    tokens: Tokens = 20480,
    context: Window = None,
    text_format: Form = "auto",
    accept_text: AcceptText = False,
    speed_at: Annotated[
        str | None, typer.Option(help="Lengths to time at; by default 1024, or as far as the models go.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time reading and writing.")] = True,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Scores to write, as JSON.")] = None,
    trust_remote_code: Trust = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare models: perplexity or agreement, KL, accuracy, parameters, cache of a real generation, speed."""
    with _importing():
        from headwise.report.scores import markdown, print_scores
        from headwise.steps.evaluate import evaluate as run

    with _progress() as progress:
        scores = run(
            models,
            texts=text or (),
            inputs=inputs,
            labels=labels,
            tokens=tokens,
            context=context,
            text_format=text_format,
            accept_text=accept_text,
            speed_at=None if speed_at is None else _numbers(speed_at),
            speed=speed,
            output=output,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    _say(scores.notes)
    if as_json:
        typer.echo(scores.json())
    elif as_markdown:
        typer.echo(markdown(scores).rstrip())
    else:
        print_scores(scores)
        if output is not None:
            typer.echo(f"\n{output}")


@app.command()
def heal(
    student: Annotated[str, typer.Argument(help="Folder of a reduced model, as compress writes it.")],
    teacher: Annotated[str, typer.Option(help="The model it was cut from: local folder or Hub id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")],
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to learn from, - for standard input; may be given several times."),
    ] = None,
    inputs: Inputs = None,
    text_format: Form = "auto",
    accept_text: AcceptText = False,
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens to learn from, as 200000 or 200k; a shorter text is read again.")
    ] = "200k",
    train: Annotated[
        Train,
        typer.Option(
            help="attention: the projections of reduced layers; values: only their singular values; lora: low-rank "
            "adapters of them, merged at the end; all: every weight."
        ),
    ] = "attention",
    stage: Annotated[
        Stage,
        typer.Option(
            help="local: each layer by itself, quick; global: all together, towards the outputs of the teacher."
        ),
    ] = "both",
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of all together, in units of each weight's root mean square; by default by --train and "
            "by how much is to learn."
        ),
    ] = None,
    local_lr: Annotated[float | None, typer.Option(help="Learning rate of single layers, in the same units.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    batch: Annotated[int, typer.Option(help="Windows that one process takes at once.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Batches that make one step.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of the teacher's and the student's probabilities.")] = 1.0,
    hidden: Annotated[float, typer.Option(help="Weight of the error of hidden states in the loss.")] = 0.0,
    next_token: Annotated[float, typer.Option(help="Weight of the loss on the text itself.")] = 0.0,
    evaluations: Annotated[int, typer.Option(help="Times to measure on held-out text; the best is saved.")] = 10,
    precision: InNumbers = "auto",
    lean: Annotated[
        bool, typer.Option("--lean", help="Less memory, more time: blocks run again for their gradients.")
    ] = False,
    log_with: Tracker = None,
    seed: Annotated[int, typer.Option(help="For the order of windows.")] = 0,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Bring a reduced model back: it learns from the one it was cut from. A rerun continues an interrupted one.

    Several processes: torchrun --nproc-per-node 2 -m headwise heal ...
    """
    with _importing():
        from headwise.records.healing import Healing
        from headwise.steps.heal import heal as run

    how = Healing(
        tokens=_count(tokens),
        train=train,
        stage=stage,
        rate=lr,
        local_rate=local_lr,
        context=context,
        batch=batch,
        accumulate=accumulate,
        temperature=temperature,
        hidden=hidden,
        next_token=next_token,
        evaluations=evaluations,
        precision=precision,
        lean=lean,
        seed=seed,
    )
    command = shlex.join(["headwise", *sys.argv[1:]])
    with _progress() as progress:
        found = run(
            student,
            teacher,
            output,
            texts=text or (),
            inputs=inputs,
            text_format=text_format,
            accept_text=accept_text,
            how=how,
            track=log_with,
            command=command,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if not found:
        return
    _say(found["notes"])
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(
            f"{output}: {found['score']} to the teacher on held-out text {found['before']:.4f} before, "
            f"{found['after']:.4f} after; reopened in a fresh process with the same outputs."
        )


@app.command()
def run(
    model: Model,
    keep_kv: Annotated[
        float | None,
        typer.Option(help="Share of the KV cache to keep; by default 0.75, of attention parameters without a cache."),
    ] = None,
    keep_attention_params: KeepParameters = None,
    kv_bytes_per_token: KvBytes = None,
    fit: Fit = None,
    text: Text = None,
    eval_text: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate on.")] = None,
    inputs: Inputs = None,
    eval_inputs: Annotated[
        Path | None, typer.Option(help="The same to evaluate on; by default what is measured on.")
    ] = None,
    tokens: Tokens = 8192,
    context: Window = None,
    text_format: Form = "auto",
    accept_text: AcceptText = False,
    eval_tokens: Annotated[int, typer.Option(help="Tokens to evaluate on.")] = 20480,
    heal_tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens to heal on, as 200000 or 200k; by default no healing.")
    ] = "0",
    precision: InNumbers = "auto",
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time reading and writing.")] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the results; by default headwise-MODEL.")
    ] = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Inspect, plan, compress, heal and evaluate a model in one folder. A rerun goes on where the last one stopped."""
    from headwise.steps.plan import read_budget

    budgets = (keep_kv, keep_attention_params, kv_bytes_per_token, fit)
    budget = None if all(value is None for value in budgets) else read_budget(*budgets)
    folder = output or Path(f"headwise-{Path(model).expanduser().resolve().name}")
    options = {
        "texts": text or (),
        "eval_texts": eval_text or (),
        "inputs": inputs,
        "eval_inputs": eval_inputs,
        "tokens": tokens,
        "eval_tokens": eval_tokens,
        "heal_tokens": _count(heal_tokens),
        "precision": precision,
        "context": context,
        "text_format": text_format,
        "accept_text": accept_text,
        "speed": speed,
        "trust_remote_code": trust_remote_code,
    }
    _run(model, folder, budget, as_json, **options)


@app.command()
def design(
    params: Annotated[str, typer.Option(metavar="N", help="Parameters the model may have, as 30M.")],
    family: Annotated[
        Literal["llama", "gpt2", "vit"], typer.Option(help="llama or gpt2 for text, vit for images.")
    ] = "llama",
    context: Annotated[int | None, typer.Option(help="Longest text in tokens; by default 1024.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens in the vocabulary; by default 8192.")] = None,
    kv_bytes_per_token: KvBytes = None,
    image_size: Annotated[int | None, typer.Option(help="Side of an image, for vit; by default 224.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="Side of a patch, for vit; by default 16.")] = None,
    channels: Annotated[int | None, typer.Option(help="Numbers in a pixel, for vit; by default 3.")] = None,
    labels: Annotated[int | None, typer.Option(help="Classes to tell apart, for vit; by default 1000.")] = None,
    lags: Annotated[
        str, typer.Option(help="How strongly early layers gather the last tokens, the one just before first.")
    ] = "1,0.5,0.25",
    intrinsic_dim: Annotated[int | None, typer.Option(help="Independent look-ups the task takes, if known.")] = None,
    choose: Annotated[
        str | None, typer.Option(metavar="NAME", help="Candidate to write instead of the recommended one.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan to write.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page to write; by default design.html beside the plan, if there is one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Propose shapes for a model that does not exist yet, all of the same size, the usual one among them."""
    from headwise.records.design import Request
    from headwise.report.designs import print_design
    from headwise.report.page.design import write_design_page
    from headwise.steps.design import design as run
    from headwise.steps.design import read_ends

    text = {"vocab": vocab, "context": context}
    images = {"image-size": image_size, "patch-size": patch_size, "channels": channels, "labels": labels}
    ends = read_ends(family, text, images)
    page = page or (None if output is None else output.with_name("design.html"))
    for file in (output, page):
        if file is not None:
            check_file(file)
    found = run(Request(family, _count(params), ends, kv_bytes_per_token, _decimals(lags), intrinsic_dim))
    chosen = found.choose(choose)
    if output is not None:
        chosen.plan.save(output)
    if page is not None:
        write_design_page(found, page)
    if as_json:
        typer.echo(found.json())
        return
    print_design(found)
    if output is not None:
        typer.echo(f"\n{output}: {chosen.name}")
    if page is not None:
        typer.echo(f"{page}  <- open in a browser")


@app.command()
def train(
    plan: Annotated[Path, typer.Option(help="Shape of the model, as design writes it.")],
    data: Data,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")],
    tokens: TrainTokens = None,
    tokenizer: Words = None,
    context: TrainContext = None,
    batch: TrainBatch = 8,
    accumulate: Accumulate = 1,
    lr: TrainRate = None,
    evaluations: Evaluations = 10,
    precision: InNumbers = "auto",
    log_with: Tracker = None,
    seed: Annotated[int, typer.Option(help="For the first weights and the order of windows.")] = 0,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train a model of a plan's shape from scratch. A rerun continues an interrupted one.

    Several processes: torchrun --nproc-per-node 2 -m headwise train ...
    """
    with _importing():
        from headwise.records.training import Training
        from headwise.steps.train import train as run

    how = Training(
        tokens=None if tokens is None else _count(tokens),
        rate=lr,
        context=context,
        batch=batch,
        accumulate=accumulate,
        evaluations=evaluations,
        precision=precision,
        seed=seed,
    )
    command = shlex.join(["headwise", *sys.argv[1:]])
    with _progress() as progress:
        found = run(
            plan,
            data,
            output,
            tokenizer=tokenizer,
            how=how,
            track=log_with,
            command=command,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if not found:
        return
    _say(found["notes"])
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in found["scores"].items())
        typer.echo(
            f"{output}: {found['class']}, {found['tokens']:,} tokens; on held-out data {scores}; reopened in a fresh "
            "process with the same outputs."
        )


papers = typer.Typer(no_args_is_help=True, help="The claims of four papers, measured: which hold, which do not.")
app.add_typer(papers, name="papers")
PaperResults = Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")]
PAPER_RESULTS = Path("results/papers")


@papers.command("list")
def list_papers(output: PaperResults = PAPER_RESULTS, as_json: AsJson = False) -> None:
    """List every claim: what decides it, how long that took and the last verdict."""
    from headwise.report.papers import print_claims

    rows = _claims(output)
    if as_json:
        typer.echo(json.dumps([row.facts() for row in rows]))
    else:
        print_claims(rows)


@papers.command("run")
def run_papers(
    what: Annotated[str, typer.Argument(metavar="KEY[/EXPERIMENT]", help="As papers list names them, or all.")],
    size: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: minutes, a hint; full: what the verdicts rest on.")
    ] = "quick",
    on: Annotated[Where, typer.Option(help="All cores of this machine, or a Ray cluster.")] = "local",
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds, where an experiment has any.")] = None,
    output: PaperResults = PAPER_RESULTS,
    as_json: AsJson = False,
) -> None:
    """Run the experiments of a paper and check its claims. A rerun never repeats a finished setting."""
    from headwise.papers.catalogue import find

    chosen = find(what)
    check_writable(output / what)
    with _importing():
        from headwise.papers.kit.grid import run_grids
        from headwise.report.papers import print_findings

    with _progress() as progress:
        found = run_grids(chosen, output, size=size, seeds=seeds, ray=on == "ray", progress=progress)
    if as_json:
        typer.echo(json.dumps([asdict(findings) for findings in found], indent=1))
    else:
        print_findings(found)


@papers.command("report")
def report_papers(output: PaperResults = PAPER_RESULTS) -> None:
    """Write what was found so far as one page and one Markdown file, the papers' figures beside ours."""
    from headwise.files.writing import write_text
    from headwise.papers.catalogue import PAPERS
    from headwise.report.page.papers import write_papers_page
    from headwise.report.papers import markdown

    check_writable(output / "papers.md")
    rows, titles = (
        _claims(output),
        {paper.key: f"{paper.key}: {paper.title} ({paper.source})" for paper in PAPERS.values()},
    )
    write_text(output / "papers.md", markdown(titles, rows))
    write_papers_page(titles, rows, output / "papers.html")
    typer.echo(f"{output / 'papers.md'}\n{output / 'papers.html'}  <- open in a browser")


def _claims(folder: Path) -> list[Row]:
    """Every claim of every paper with its verdict, of a full run where there was one."""
    from headwise.papers.catalogue import PAPERS, SIZES
    from headwise.records.papers import Findings
    from headwise.report.papers import rows

    found = []
    for paper in PAPERS.values():
        loaded = {name: Findings.load(folder, paper.key, name, SIZES[::-1]) for name in paper.experiments}
        found += rows(paper.key, paper.claims, loaded)
    return found


@app.command()
def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="Shapes as design writes them; the first is the measure.")
    ],
    data: Data,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")],
    seeds: Annotated[int, typer.Option(help="Trainings of each shape, with different seeds.")] = 3,
    tokens: TrainTokens = None,
    tokenizer: Words = None,
    context: TrainContext = None,
    batch: TrainBatch = 8,
    accumulate: Accumulate = 1,
    lr: TrainRate = None,
    evaluations: Evaluations = 10,
    precision: InNumbers = "auto",
    on: Annotated[Where, typer.Option(help="ray: trainings are tasks of Ray, on this machine or a cluster.")] = "local",
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Train several shapes on the same data, and compare them at equal parameters, tokens and wall-clock.

    A rerun of the same command goes on where the last one stopped.
    """
    with _importing():
        from headwise.pipelines.compare import HELD_OUT, PAGE, RESULT
        from headwise.pipelines.compare import compare as run
        from headwise.records.training import Training
        from headwise.report.comparisons import print_comparison

    how = Training(
        tokens=None if tokens is None else _count(tokens),
        rate=lr,
        context=context,
        batch=batch,
        accumulate=accumulate,
        held_out=HELD_OUT,
        evaluations=evaluations,
        precision=precision,
    )
    notes: list[str] = []
    with _progress() as progress:
        found = run(
            plans,
            data,
            output,
            seeds=seeds,
            tokenizer=tokenizer,
            config=how,
            on=on,
            trust_remote_code=trust_remote_code,
            progress=progress,
            note=notes.append,
        )
    _say(notes)
    if as_json:
        typer.echo((output / RESULT).read_text(encoding="utf-8").rstrip())
    else:
        print_comparison(found)
        typer.echo(f"\n{output / RESULT}\n{output / PAGE}  <- open in a browser")


@app.command()
def demo() -> None:
    """The whole line on SmolLM2-135M, from its PyPI wheel: keep 75 % of its KV cache and heal it, in some minutes."""
    typer.echo("Opening SmolLM2-135M-Instruct (converted once, then kept in your cache folder) ...", err=True)
    with _importing():
        from headwise.steps.demo import demo_model
        from headwise.steps.generate import continue_text

    folder, made = str(demo_model()), Path("headwise-demo")
    cost(folder)
    typer.echo("\nMeasuring, planning, cutting, healing and evaluating, with little text to be quick ...", err=True)
    quick = {"tokens": 2048, "lengths": (64, 128, 256, 512), "eval_tokens": 4096, "heal_tokens": 4096, "speed": False}
    _run(folder, made, None, False, **quick)
    prompt = "The capital of France is Paris, and the capital of Germany is"
    for name in (folder, str(made / "model"), str(made / "healed")):
        typer.echo(f"\n{Path(name).name}: {continue_text(name, prompt)}")
    typer.echo(
        f'\nAutoModelForCausalLM.from_pretrained("{made / "healed"}", trust_remote_code=True) opens it anywhere; with '
        "headwise imported it needs no trust_remote_code."
    )


def _run(model: str, folder: Path, budget: Budget | None, as_json: bool, **options: Any) -> None:
    """Walk the whole line and print what came out."""
    with _importing():
        from headwise.pipelines.run import HEALED, MODEL, PLAN, SCORES, run
        from headwise.report.plans import print_plan
        from headwise.report.scores import print_scores
        from headwise.steps.inspect import PAGE

    command = shlex.join(["headwise", *sys.argv[1:]])
    with _progress() as progress:
        profile, plan, scores = run(model, folder, budget, command=command, progress=progress, **options)
    _say((*profile.notes, *scores.notes))
    if as_json:
        typer.echo(scores.json())
        return
    print_plan(plan, profile)
    typer.echo()
    print_scores(scores)
    made = [folder / PLAN, folder / SCORES, folder / MODEL, *([folder / HEALED] if options.get("heal_tokens") else [])]
    typer.echo("\n" + "\n".join(map(str, made)) + f"\n{folder / PAGE}  <- open in a browser")


def _is_model(source: str) -> bool:
    """Whether ``source`` is a model, and not a profile or the folder of one."""
    path = Path(source).expanduser()
    return path.name != "profile.json" and not (path / "profile.json").is_file()


def _profile_of(source: str, text: list[str] | None, text_format: TextFormat, accept_text: bool, trusted: bool) -> Path:
    """The folder of a profile: ``source`` itself, or where the model ``source`` is measured for planning."""
    path = Path(source).expanduser()
    if not _is_model(source):
        return path.parent if path.name == "profile.json" else path
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"{source} holds no profile.json and no model.")
    with _importing():
        from headwise.steps.inspect import inspect as run
    folder = Path(f"headwise-{path.resolve().name}-statistics")
    with _progress() as progress:
        run(
            source,
            folder,
            texts=text or (),
            text_format=text_format,
            accept_text=accept_text,
            maps=False,
            trust_remote_code=trusted,
            progress=progress,
        )
    return folder


def _say(notes: Iterable[str]) -> None:
    """What a person should know, on standard error."""
    for note in notes:
        typer.echo(f"headwise: {note}", err=True)


def _count(text: str) -> int:
    """A number such as 200000, 200k, 1M or 2B."""
    factor = {"k": 1000, "m": 1_000_000, "b": 1_000_000_000}.get(text[-1:].lower(), 1)
    try:
        return round(float(text if factor == 1 else text[:-1]) * factor)
    except (ValueError, OverflowError):
        raise InputError(f"Expected a number such as 200000, 200k or 1M, got {text!r}.") from None


def _decimals(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"Lags must be numbers with commas between them, got {text!r}.") from None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"Lengths must be whole numbers with commas between them, got {text!r}.") from None


@contextmanager
def _progress() -> Generator[Callable[[int, int, str], None], None, None]:
    """A bar with the time left on standard error; silent where nobody watches, and in all processes but the first."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console, first = Console(stderr=True), os.environ.get("RANK", "0") == "0"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not first) as bar:
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
        _check_arguments()
        app()
    except InputError as error:
        _fail(str(error), 2)
    except Failed as error:
        _fail(str(error), 1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _fail(
                "stopped; nothing is half-written. Where a command can go on later, the same command does.", INTERRUPTED
            )
        raise
    except OSError as error:
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 1)


def _check_arguments() -> None:
    """Raise where an argument cannot be written into a card or a page: names of files are any bytes on some systems."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InputError(f"The argument {argument!r} is not UTF-8 text; rename the file.") from None


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"headwise: {sentence}", err=True)
    sys.exit(code)
