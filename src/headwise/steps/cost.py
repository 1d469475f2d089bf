"""What a model costs, from its config alone, before and after a plan."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from headwise.checkpoints.load import open_shape
from headwise.families.shapes import shape_of
from headwise.records.cost import Cost, CostReport, cost_of
from headwise.records.plan import Plan
from headwise.records.settings import CostConfig
from headwise.records.shape import ModelShape

DEFAULT_CONTEXT = 8192


def cost(
    model: PreTrainedModel | ModelShape | Path | str,
    plan: Plan | None = None,
    *,
    context: int | None = None,
    batch: int = 1,
    cache_dtype: str = "bf16",
) -> Cost:
    """Parameters, KV cache and FLOPs of ``model``, in all and by layer; with a ``plan`` what they are after it.

    ``model`` is a model of transformers, its shape, or a folder, config.json or Hub id, of which no weight is read.
    ``context`` are the tokens of each sequence, by default what the model was made for, up to 8,192; ``batch`` the
    sequences at once; ``cache_dtype`` what the cache holds: fp32, bf16, fp16 or fp8.

    >>> hw.cost(model, context=64).kv_bytes == 64 * hw.cost(model).kv_bytes_per_token
    True
    """
    shape = _shape(model)
    config = CostConfig(context, batch, cache_dtype)
    return _cost(shape if plan is None else shape.planned(plan), config, shape)


def report_cost(source: str, plan_file: Path | None, config: CostConfig) -> CostReport:
    """The cost of the model at ``source`` before and after a plan, side by side; no weight is read."""
    plan = None if plan_file is None else Plan.load(plan_file)
    shape = open_shape(source)
    if plan is None:
        return CostReport(shape, _cost(shape, config, shape))
    after = shape.planned(plan)
    numbers = iter(range(len(after.layers)))
    kept = tuple(None if layer is None else next(numbers) for layer in plan.after(shape))
    return CostReport(shape, _cost(shape, config, shape), after, _cost(after, config, shape), kept, plan.describe())


def _shape(model: PreTrainedModel | ModelShape | Path | str) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    return shape_of(model) if isinstance(model, PreTrainedModel) else open_shape(str(model))


def _cost(shape: ModelShape, config: CostConfig, before: ModelShape) -> Cost:
    context = min(DEFAULT_CONTEXT, before.max_tokens) if config.context is None else config.context
    return cost_of(shape, context, config.batch, config.cache_dtype)
