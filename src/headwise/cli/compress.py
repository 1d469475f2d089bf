"""headwise compress"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing, typed
from headwise.cli.options import AsJson, Model, NewFolder
from headwise.cli.progress import notes, watched
from headwise.records.settings import CompressConfig, OpenConfig

WAYS = {"weighted": "along measured directions", "token-weighted": "by second moments of tokens"}


def compress(
    model: Model,
    plan: Annotated[Path, typer.Option(help="What to keep of each layer.")],
    output: NewFolder,
    config: CompressConfig,
    opening: OpenConfig,
    profile: Annotated[Path | None, typer.Option(help="Folder of the profile, if it has moved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut a model to a plan and save it, checked: along what its profile measured, else by its weights alone."""
    with importing():
        from headwise.steps.compress import compress as cut

    settings = {"config": config, "opening": opening, "profile": profile, "command": typed()}
    with watched() as progress:
        report = cut(model, plan, output, progress=progress, **settings)
    notes(report["notes"])
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    refit = f", {' and '.join(report['refit'])} refitted" if report["refit"] else ""
    if report["cut"] is not None and not report["refit"]:
        refit = ", not refitted (that did not help on held-out text)"
    way = WAYS.get(report["method"], "by the weights alone")
    typer.echo(f"{output}: {report['class']}, cut {way}{refit}, reopened in a fresh process with the same outputs.")
