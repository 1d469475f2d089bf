"""headwise compare"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, Data, Tokenizer
from headwise.cli.progress import notes, watched
from headwise.records.settings import TrainConfig, TrustConfig


def compare(
    plans: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="Shapes as design writes them; the first is the measure.")
    ],
    data: Data,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")],
    config: TrainConfig,
    trust: TrustConfig,
    seeds: Annotated[int, typer.Option(help="Trainings of each shape, with different seeds.")] = 3,
    tokenizer: Tokenizer = None,
    on: Annotated[
        Literal["local", "ray"], typer.Option(help="ray: trainings are tasks of Ray, on this machine or a cluster.")
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Train several shapes on the same data, and compare them at equal parameters, tokens and wall-clock.

    A rerun of the same command goes on where the last one stopped.
    """
    with importing():
        from headwise.pipelines.compare import HELD_OUT, PAGE, RESULT
        from headwise.pipelines.compare import compare as train_all
        from headwise.report.comparisons import print_comparison

    remarks: list[str] = []
    with watched() as progress:
        comparison = train_all(
            plans,
            data,
            output,
            seeds=seeds,
            tokenizer=tokenizer,
            config=replace(config, held_out=HELD_OUT),
            on=on,
            trust_remote_code=trust.trust_remote_code,
            progress=progress,
            note=remarks.append,
        )
    notes(remarks)
    if as_json:
        typer.echo((output / RESULT).read_text(encoding="utf-8").rstrip())
    else:
        print_comparison(comparison)
        typer.echo(f"\n{output / RESULT}\n{output / PAGE}  <- open in a browser")
