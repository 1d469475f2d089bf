"""From heads and widths of the layers to a plan that spends a budget of parameters and keeps one of KV bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.files.errors import InputError
from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint
from headwise.records.cost import DTYPE_BYTES
from headwise.records.design import DTYPE, Request
from headwise.theory.tradeoff import HeadGroup

STEPS = (8, 4, 2, 1)
FINEST = 200  # a step costs no more of the budget than one part in this many


@dataclass(frozen=True, slots=True)
class Draft:
    """Heads and their width in every layer of a residual stream of ``width``; the MLP gets what is left.

    ``sharing`` query heads have one head for keys and values between them, more where the cache must be smaller.
    """

    width: int
    layers: tuple[HeadGroup, ...]
    sharing: int = 1


def layer_plans(request: Request, draft: Draft) -> tuple[LayerPlan, ...]:
    """The layers with as many key/value heads as ``draft`` asks for and equal shares of the cache's budget allow."""
    limit, count, plans = request.kv_bytes_per_token, len(draft.layers), []
    for heads, head_dim in draft.layers:
        most = heads // draft.sharing
        if limit is not None:
            most = min(most, limit // count // (DTYPE_BYTES[DTYPE] * 2 * head_dim))
        if not most:
            raise InputError(f"{count} layers with heads of {head_dim} take more than {limit:,} bytes per token.")
        shared = next(divisor for divisor in range(most, 0, -1) if heads % divisor == 0)
        plans.append(LayerPlan(heads, shared, head_dim, head_dim))
    return tuple(plans)


def widest_mlp(request: Request, width: int, layers: Sequence[LayerPlan]) -> int:
    """How wide an MLP the budget allows, in steps of 8, or of less where those would be coarse; 0: none at all."""
    dims = [layer.dims for layer in layers]
    least, more = (
        Blueprint(mlp, request.reads).shape(request.family, width, dims).total_parameters() for mlp in (1, 2)
    )
    each = more - least
    step = next(step for step in STEPS if step * each * FINEST <= request.parameters or step == STEPS[-1])
    return max(0, (request.parameters - least) // each + 1) // step * step


def finished(request: Request, draft: Draft) -> Plan:
    """The plan of ``draft`` with the MLP that spends the budget."""
    layers = layer_plans(request, draft)
    mlp = widest_mlp(request, draft.width, layers)
    if not mlp:
        raise InputError(f"Its attention alone takes more than {request.parameters:,} parameters.")
    blueprint = Blueprint(mlp, request.reads)
    shape = blueprint.shape(request.family, draft.width, [layer.dims for layer in layers])
    return Plan.make(shape, layers, budget=request.body(), blueprint=blueprint)
