"""headwise run"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.heavy import importing, typed
from headwise.cli.inspect import results_of
from headwise.cli.options import AsJson, Folder, Inputs, Model, Part, Text
from headwise.cli.progress import notes, watched
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.settings import BudgetConfig, CacheConfig, EvaluateConfig, InspectConfig, OpenConfig, ReadConfig


def run(
    model: Model,
    budget: BudgetConfig,
    cache: CacheConfig,
    config: InspectConfig,
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
    --heal-tokens nothing is healed.
    """
    from headwise.steps.plan import read_budget

    given = any(value is not None for value in (budget.keep_kv, budget.keep_attention_params, budget.fit))
    limit = read_budget(budget, None, cache) if given or budget.kv_bytes_per_token is not None else None
    whole_line(
        model,
        output or results_of(model),
        limit,
        as_json,
        texts=text or (),
        eval_texts=eval_text or (),
        inputs=inputs,
        eval_inputs=eval_inputs,
        tokens=config.tokens,
        context=config.context,
        lengths=config.lengths,
        seed=config.seed,
        eval_tokens=evaluation.tokens,
        speed=evaluation.speed,
        healing=healing,
        text_format=reading.text_format,
        accept_text=reading.accept_text,
        trust_remote_code=opening.trust_remote_code,
    )


def whole_line(model: str, folder: Path, budget: Budget | None, as_json: bool, **options: Any) -> None:
    """Walk the whole line and print what came out."""
    with importing():
        from headwise.pipelines.run import HEALED, MODEL, PLAN, SCORES
        from headwise.pipelines.run import run as walk
        from headwise.report.plans import print_plan
        from headwise.report.scores import print_scores
        from headwise.steps.inspect import PAGE

    with watched() as progress:
        profile, plan, scores = walk(model, folder, budget, command=typed(), progress=progress, **options)
    notes((*profile.notes, *scores.notes))
    if as_json:
        typer.echo(scores.json())
        return
    print_plan(plan, profile)
    typer.echo()
    print_scores(scores)
    results = [PLAN, SCORES, MODEL, *([HEALED] if options.get("healing") else [])]
    typer.echo("\n" + "\n".join(str(folder / name) for name in results) + f"\n{folder / PAGE}  <- open in a browser")
