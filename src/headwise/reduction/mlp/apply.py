"""The channels of an MLP that stay: those the loss feels most, or without measurements those of the largest weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.mlp import MlpWeights
from headwise.files.errors import InputError
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.mlp.change import Channels

ORDER = "mlp_order"


def apply(weights: MlpWeights, change: Channels, layer: LayerShape, statistics: Statistics | None) -> MlpWeights | None:
    """The weights of the channels that stay, in their own order; None where none stays."""
    if not change.channels:
        return None
    kept = _order(weights, statistics)[: change.channels].sort().values

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[kept]

    return replace(
        weights,
        w_up_MD=weights.w_up_MD[kept],
        w_down_MD=weights.w_down_MD[kept],
        w_gate_MD=pick(weights.w_gate_MD),
        b_up_M=pick(weights.b_up_M),
        b_gate_M=pick(weights.b_gate_M),
    )


def _order(weights: MlpWeights, statistics: Statistics | None) -> Tensor:
    """All channels, the one that matters most first."""
    measured = None if statistics is None else statistics.tensors.get(ORDER)
    if measured is None:
        inward = [w for w in (weights.w_up_MD, weights.w_gate_MD) if w is not None]
        norms = torch.stack([w.float().norm(dim=1) for w in (*inward, weights.w_down_MD)])
        return norms.prod(0).argsort(descending=True, stable=True)
    order = measured.long().to(weights.w_up_MD.device)
    if not torch.equal(order.sort().values, torch.arange(len(weights.w_up_MD), device=order.device)):
        raise InputError(f"The order of the MLP channels in the profile is not one of {len(weights.w_up_MD)} channels.")
    return order
