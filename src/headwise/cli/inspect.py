"""headwise inspect"""

from __future__ import annotations

from pathlib import Path

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, Folder, Inputs, Model, Text
from headwise.cli.progress import notes, watched
from headwise.records.settings import InspectConfig, OpenConfig, ReadConfig


def inspect(
    model: Model,
    config: InspectConfig,
    reading: ReadConfig,
    opening: OpenConfig,
    text: Text = None,
    inputs: Inputs = None,
    output: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure what every head of a model really uses, and write a profile and a page that shows it.

    A rerun of the same command continues an unfinished measurement, or shows the finished one.
    """
    with importing():
        from headwise.checkpoints.profiled import PROFILE
        from headwise.pipelines.profile import PAGE, inspect_folder
        from headwise.report.profiles import print_profile

    folder = output or results_of(model)
    with watched() as progress:
        profile = inspect_folder(
            model,
            folder,
            texts=text or (),
            inputs=inputs,
            config=config,
            reading=reading,
            opening=opening,
            progress=progress,
        )
    notes(profile.notes)
    if as_json:
        typer.echo((folder / PROFILE).read_text(encoding="utf-8").rstrip())
    else:
        print_profile(profile)
        typer.echo(f"\n{folder / PROFILE}\n{folder / PAGE}  <- open in a browser")


def results_of(model: str) -> Path:
    """The folder for what is measured of a model, where nobody names one."""
    return Path(f"headwise-{Path(model).expanduser().resolve().name}")
