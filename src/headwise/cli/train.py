"""headwise train"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing, typed
from headwise.cli.options import AsJson, Data, NewFolder, Tokenizer, Tracker
from headwise.cli.progress import notes, watched
from headwise.records.settings import TrainConfig, TrustConfig


def train(
    plan: Annotated[Path, typer.Option(help="Shape of the model, as design writes it.")],
    data: Data,
    output: NewFolder,
    config: TrainConfig,
    trust: TrustConfig,
    tokenizer: Tokenizer = None,
    log_with: Tracker = None,
    as_json: AsJson = False,
) -> None:
    """Train a model of a plan's shape from scratch. A rerun continues an interrupted one.

    Several processes: torchrun --nproc-per-node 2 -m headwise train ...
    """
    with importing():
        from headwise.steps.train import train as fit

    with watched() as progress:
        report = fit(
            plan,
            data,
            output,
            tokenizer=tokenizer,
            config=config,
            track=log_with,
            command=typed(),
            trust_remote_code=trust.trust_remote_code,
            progress=progress,
        )
    if not report:
        return
    notes(report["notes"])
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in report["scores"].items())
        checked = "" if report.get("finished_before") else "; reopened in a fresh process with the same outputs"
        typer.echo(f"{output}: {report['class']}, {report['tokens']:,} tokens; on held-out data {scores}{checked}.")
