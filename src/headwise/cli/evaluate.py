"""headwise evaluate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, Inputs
from headwise.cli.progress import notes, watched
from headwise.records.settings import EvaluateConfig, OpenConfig, ReadConfig


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Local folders or Hub ids; all are compared with the first.")
    ],
    config: EvaluateConfig,
    reading: ReadConfig,
    opening: OpenConfig,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Text to evaluate on, as for inspect; by default headwise's evaluation text."
        ),
    ] = None,
    inputs: Inputs = None,
    labels: Annotated[
        Path | None, typer.Option(help="For models that classify text: a file of label, tab, text in each line.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Scores to write, as JSON.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare models: perplexity or agreement, KL, accuracy, parameters, cache of a real generation, speed."""
    with importing():
        from headwise.report.scores import markdown, print_scores
        from headwise.steps.evaluate import evaluate_folders

    with watched() as progress:
        scores = evaluate_folders(
            models,
            texts=text or (),
            inputs=inputs,
            labels=labels,
            config=config,
            reading=reading,
            opening=opening,
            output=output,
            progress=progress,
        )
    notes(scores.notes)
    if as_json:
        typer.echo(scores.json())
    elif as_markdown:
        typer.echo(markdown(scores).rstrip())
    else:
        print_scores(scores)
        if output is not None:
            typer.echo(f"\n{output}")
