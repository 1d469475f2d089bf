"""headwise run"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing, typed
from headwise.cli.inspect import results_of
from headwise.cli.options import AsJson, Folder, Inputs, Model, Part, Text
from headwise.cli.progress import notes, watched
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.running import RunConfig
from headwise.records.settings import (
    BudgetConfig,
    CacheConfig,
    CompressConfig,
    EvaluateConfig,
    InspectConfig,
    OpenConfig,
    PlanConfig,
    ReadConfig,
)


def run(
    model: Model,
    budget: BudgetConfig,
    cache: CacheConfig,
    measuring: InspectConfig,
    planning: PlanConfig,
    cutting: CompressConfig,
    healing: Annotated[HealConfig | None, Part("heal", ("precision",), needs="tokens", defaults={"tokens": 0})],
    evaluation: Annotated[EvaluateConfig, Part("eval", ("speed", "speed_at"))],
    reading: ReadConfig,
    opening: OpenConfig,
    text: Text = None,
    eval_text: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Text to evaluate on.")] = None,
    inputs: Inputs = None,
    eval_inputs: Annotated[
        Path | None, typer.Option(help="The same to evaluate on; by default what is measured on.")
    ] = None,
    output: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Inspect, plan, compress, heal and evaluate a model in one folder. A rerun goes on where the last one stopped.

    Without a budget 75% of the KV cache is kept, or of the attention parameters of models without a cache; without
    --heal-tokens nothing is healed; without --eval-context models are evaluated in windows of --context.
    """
    from headwise.steps.plan import given_budget, read_layers

    limit = given_budget(budget, cache)
    if planning.protect is not None:
        read_layers(planning.protect)  # says what is wrong with it before anything is measured
    whole_line(
        model,
        output or results_of(model),
        limit,
        RunConfig(measuring, planning, cutting, healing, evaluation, reading, opening),
        text=text or (),
        eval_text=eval_text or (),
        inputs=inputs,
        eval_inputs=eval_inputs,
        as_json=as_json,
    )


def whole_line(
    model: str,
    folder: Path,
    budget: Budget | None,
    config: RunConfig,
    *,
    text: list[str] | tuple[()] = (),
    eval_text: list[str] | tuple[()] = (),
    inputs: Path | None = None,
    eval_inputs: Path | None = None,
    as_json: bool = False,
) -> None:
    """Walk the whole line and print what came out."""
    with importing():
        from headwise.pipelines.profile import PAGE
        from headwise.pipelines.run import HEALED, MODEL, PLAN, SCORES, run_folder
        from headwise.report.plans import print_plan
        from headwise.report.scores import print_scores

    with watched() as progress:
        profile, plan, scores = run_folder(
            model,
            folder,
            budget,
            texts=text,
            eval_texts=eval_text,
            inputs=inputs,
            eval_inputs=eval_inputs,
            config=config,
            command=typed(),
            progress=progress,
        )
    notes((*profile.notes, *scores.notes))
    if as_json:
        typer.echo(scores.json())
        return
    print_plan(plan, profile)
    typer.echo()
    print_scores(scores)
    results = [PLAN, SCORES, MODEL, *([HEALED] if config.heal else [])]
    typer.echo("\n" + "\n".join(str(folder / name) for name in results) + f"\n{folder / PAGE}  <- open in a browser")
