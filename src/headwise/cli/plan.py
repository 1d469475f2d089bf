"""headwise plan"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing
from headwise.cli.inspect import results_of
from headwise.cli.options import AsJson
from headwise.cli.progress import watched
from headwise.files.errors import InputError
from headwise.files.writing import check_file
from headwise.records.settings import (
    BoundConfig,
    BudgetConfig,
    CacheConfig,
    InspectConfig,
    OpenConfig,
    PlanConfig,
    ReadConfig,
)


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE|MODEL", help="profile.json, the folder inspect wrote, or a model that is measured first."
        ),
    ],
    budget: BudgetConfig,
    bound: BoundConfig,
    cache: CacheConfig,
    config: PlanConfig,
    reading: ReadConfig,
    opening: OpenConfig,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure on: a MODEL, or the bound, which by default takes what the profile held out.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan to write.")] = Path("plan.json"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose what every layer keeps so that a budget, or several at once, is kept to where the loss feels it least.

    From a profile this takes a second. A model is measured first, into the folder headwise-MODEL-statistics. Decode
    time is measured too, once for each model, length and device.
    """
    from headwise.pipelines.plans import options_of
    from headwise.report.plans import print_plan
    from headwise.steps.plan import make_plan, read_budget

    limit = read_budget(budget, bound, cache)
    file = None if dry_run else output
    if file is not None:
        check_file(file)
    options = options_of(config)
    folder = _profile_of(source, text, reading, opening, positions=config.absorb)
    if limit is not None and limit.timed:
        with importing():
            from headwise.pipelines.plans import timed
        with watched() as progress:
            limit = timed(limit, folder, opening=opening, progress=progress)
    if limit is not None:
        chosen, profile = make_plan(folder, file, limit, **options)
    else:
        with importing():
            from headwise.steps.search import plan_within
        with watched() as progress:
            chosen, profile = plan_within(
                folder,
                file,
                bound.nats or 0.0,
                texts=() if _is_model(source) else text or (),
                reading=reading,
                opening=opening,
                context=cache.cache_tokens,
                dtype=cache.cache_dtype,
                progress=progress,
                **options,
            )
    if as_json:
        typer.echo(chosen.text())
        return
    print_plan(chosen, profile)
    if not dry_run:
        typer.echo(f"\n{output}")


def _is_model(source: str) -> bool:
    """Whether ``source`` is a model, and not a profile or the folder of one."""
    path = Path(source).expanduser()
    return path.name != "profile.json" and not (path / "profile.json").is_file()


def _profile_of(
    source: str, text: list[str] | None, reading: ReadConfig, opening: OpenConfig, *, positions: bool
) -> Path:
    """The folder of a profile: ``source`` itself, or where the model ``source`` is measured for planning."""
    path = Path(source).expanduser()
    if not _is_model(source):
        return path.parent if path.name == "profile.json" else path
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"{source} holds no profile.json and no model.")
    with importing():
        from headwise.pipelines.profile import inspect_folder
    folder = Path(f"{results_of(source)}-statistics")
    with watched() as progress:
        inspect_folder(
            source,
            folder,
            texts=text or (),
            config=InspectConfig(maps=False, positions=positions),
            reading=reading,
            opening=opening,
            progress=progress,
        )
    return folder
