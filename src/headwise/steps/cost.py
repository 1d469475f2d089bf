"""What a model costs, from its config alone, before and after a plan."""

from __future__ import annotations

from pathlib import Path

from headwise.checkpoints.load import open_shape
from headwise.records.cost import CostReport, cost_of
from headwise.records.plan import Plan

DEFAULT_CONTEXT = 8192


def report_cost(source: str, plan_file: Path | None, context: int | None, batch: int, dtype: str) -> CostReport:
    """The cost of the model at ``source``; no weight is read. ``context`` None: what it was made for, up to 8,192."""
    plan = None if plan_file is None else Plan.load(plan_file)
    shape = open_shape(source)
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.max_tokens)
    cost = cost_of(shape, context, batch, dtype)
    if plan is None:
        return CostReport(shape, cost)
    after = shape.planned(plan)
    numbers = iter(range(len(after.layers)))
    kept = tuple(None if layer is None else next(numbers) for layer in plan.after(shape))
    return CostReport(shape, cost, after, cost_of(after, context, batch, dtype), kept, plan.describe())
