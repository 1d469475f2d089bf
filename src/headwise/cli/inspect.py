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
        from headwise.report.profiles import print_profile
        from headwise.steps.inspect import PAGE, PROFILE
        from headwise.steps.inspect import inspect as measure

    folder = output or results_of(model)
    with watched() as progress:
        profile = measure(
            model,
            folder,
            texts=text or (),
            inputs=inputs,
            tokens=config.tokens,
            context=config.context,
            lengths=config.lengths,
            seed=config.seed,
            text_format=reading.text_format,
            accept_text=reading.accept_text,
            trust_remote_code=opening.trust_remote_code,
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
