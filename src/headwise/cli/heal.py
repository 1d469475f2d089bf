"""headwise heal"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headwise.cli.heavy import importing, typed
from headwise.cli.options import AsJson, Inputs, NewFolder, Tracker
from headwise.cli.progress import notes, watched
from headwise.records.healing import HealConfig
from headwise.records.settings import OpenConfig, ReadConfig


def heal(
    student: Annotated[str, typer.Argument(help="Folder of a reduced model, as compress writes it.")],
    teacher: Annotated[str, typer.Option(help="The model it was cut from: local folder or Hub id.")],
    output: NewFolder,
    config: HealConfig,
    reading: ReadConfig,
    opening: OpenConfig,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to learn from, - for standard input; may be given several times."),
    ] = None,
    inputs: Inputs = None,
    log_with: Tracker = None,
    as_json: AsJson = False,
) -> None:
    """Bring a reduced model back: it learns from the one it was cut from. A rerun continues an interrupted one.

    Several processes: torchrun --nproc-per-node 2 -m headwise heal ...
    """
    with importing():
        from headwise.steps.heal import heal as distil

    settings = {"config": config, "reading": reading, "opening": opening, "track": log_with, "command": typed()}
    with watched() as progress:
        report = distil(student, teacher, output, texts=text or (), inputs=inputs, progress=progress, **settings)
    if not report:
        return
    notes(report["notes"])
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        typer.echo(
            f"{output}: {report['score']} to the teacher on held-out text {report['before']:.4f} before, "
            f"{report['after']:.4f} after; reopened in a fresh process with the same outputs."
        )
