"""Commands from functions: settings become one option for each of their fields, with their defaults and words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headwise.cli import progress

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local folder, config.json or Hub id.")]
Text = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Calibration text, - for standard input; .jsonl with messages or text in each line; may be given several "
        "times. By default prose that comes with headwise, and dialogues for models that chat.",
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(help="For models that do not read text: a folder of pictures, or .npz with the model's inputs."),
]
Folder = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for the results; by default headwise-MODEL.")
]
NewFolder = Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Data = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help="Text in UTF-8, or .npz with pixel_values and labels for vit; may be given several times.",
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Tokenizer to use; by default one is learnt from the data.")
]
Tracker = Annotated[
    str | None, typer.Option(metavar="TRACKER", help="tensorboard, wandb, trackio, ...: see Accelerate.")
]
PANELS = {
    "BudgetConfig": "Budget (one of these, or several at once)",
    "BoundConfig": "Bound on what is measured, instead of a budget",
    "CacheConfig": "Counting the cache",
    "OpenConfig": "Running the model",
    "TrustConfig": "Running the model",
    "ReadConfig": "Reading text",
    "InspectConfig": "Measuring",
    "PlanConfig": "Planning",
    "CompressConfig": "Cutting",
    "HealConfig": "Healing",
    "EvaluateConfig": "Evaluating",
    "TrainConfig": "Training",
}
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on standard error but what went wrong.")]
VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="Log lines with times instead of a bar.")]


@dataclass(frozen=True)
class Part:
    """Settings of one step among others: their options carry its name, but for those in ``plain``.

    ``needs`` names a field that is off by default: without it there are no such settings.
    """

    name: str
    plain: tuple[str, ...] = ()
    needs: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as Typer takes it: every parameter that is a dataclass replaced by an option for each field."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, tuple[type, Part, dict[str, Field[Any]]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        settings, part = _settings(parameter.annotation)
        if settings is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        shown = {_name(each.name, part): each for each in fields(settings) if "help" in each.metadata}
        groups[parameter.name] = (settings, part, shown)
        hints = get_type_hints(settings)
        parameters += [
            _parameter(name, each, hints[each.name], part, PANELS.get(settings.__name__))
            for name, each in shown.items()
        ]
    for name, annotation in (("quiet", QUIET), ("verbose", VERBOSE)):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation))

    @functools.wraps(function)
    def run(*, quiet: bool, verbose: bool, **values: Any) -> None:
        progress.set_level(quiet=quiet, verbose=verbose)
        chosen: dict[str, Any] = {}  # an option may be called like the settings of another group
        for name, (settings, part, names) in groups.items():
            own = {each.name: _read(each, values.pop(shown_name)) for shown_name, each in names.items()}
            chosen[name] = None if part.needs and not own[part.needs] else settings(**own)
        function(**values, **chosen)

    run.__signature__ = signature.replace(parameters=parameters)  # pyrefly: ignore[missing-attribute]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _settings(annotation: Any) -> tuple[type | None, Part]:
    """The dataclass behind an annotation, if it is one, and how its options are called."""
    part = Part("")
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
        part = next((mark for mark in marks if isinstance(mark, Part)), part)
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and is_dataclass(kind)]
    return (kinds[0] if kinds else None), part


def _name(name: str, part: Part) -> str:
    return f"{part.name}_{name}" if part.name and name not in part.plain else name


def _parameter(name: str, each: Field[Any], annotation: Any, part: Part, panel: str | None) -> inspect.Parameter:
    """An option as Typer takes it; what has a grammar of its own is a word for Typer, see `_read`."""
    meta = each.metadata
    flags = tuple(_flag(flag, each.name, part) for flag in meta["flags"])
    default = part.defaults.get(each.name, ... if each.default is MISSING else each.default)
    if "read" in meta:
        annotation = str | None if default is None else str
        if isinstance(default, tuple):
            default = ",".join(f"{number:g}" for number in default)
        elif default not in (None, ...):
            default = str(default)
    metavar = meta.get("metavar", "N" if "read" in meta else None)
    shown = typer.Option(*flags, help=meta["help"], metavar=metavar, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, shown]
    )


def _read(each: Field[Any], value: Any) -> Any:
    """What was typed in the grammar of `headwise.files.numbers`, where the field has one."""
    return each.metadata["read"](value) if "read" in each.metadata and isinstance(value, str) else value


def _flag(flag: str, name: str, part: Part) -> str:
    """``--lr`` of a part called heal is ``--heal-lr``."""
    if not part.name or name in part.plain:
        return flag
    return "/".join(f"--{part.name}-{each.removeprefix('--')}" for each in flag.split("/"))
