"""headwise cost"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, Model
from headwise.records.settings import CostConfig


def cost(
    model: Model,
    config: CostConfig,
    plan: Annotated[Path | None, typer.Option(help="Plan to show the cost of, beside the cost of now.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print parameters, KV cache and FLOPs of a model, layer by layer, without loading its weights."""
    with importing():
        from headwise.report.costs import print_costs
        from headwise.steps.cost import report_cost

    report: Any = report_cost(model, plan, config)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
    else:
        print_costs(report)
