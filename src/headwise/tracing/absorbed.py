"""Second moments of what blocks of key/value heads cache, and of the gradients there, the first tokens among them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headwise.linalg.absorbed import Moments
from headwise.linalg.attention import Attention
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape
from headwise.tracing.coded import BOTH, PARTS, WHOLE
from headwise.tracing.turns import Turns


def add_first(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add the mean and second moment of the first tokens, which `headwise.tracing.coded` leaves out."""
    first = _blocks(layer, turns.back(attention.k_BGSK.float(), pairs_GP), attention.v_BGSV.float())
    sums.add("first_mean", first.sum(1), first.shape[1])
    sums.add("first_moment", first.mT @ first, first.shape[1])


def watch_first(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add the second moment of the gradients at the first tokens, as they come."""
    then = copy.copy(turns)
    gradients: dict[str, Tensor] = {}

    def add(name: str, gradient_BGSC: Tensor) -> None:
        gradients[name] = gradient_BGSC.float()
        if len(gradients) == len(PARTS):
            first = _blocks(layer, *(gradients.pop(part) for part in PARTS))
            sums.add("first_gradient", first.mT @ first, first.shape[1])

    attention.k_BGSK.register_hook(lambda gradient: add("k", then.gradient(gradient.float(), pairs_GP)))
    attention.v_BGSV.register_hook(lambda gradient: add("v", gradient))


def _blocks(layer: LayerShape, k_BGSK: Tensor, v_BGSV: Tensor) -> Tensor:
    """Keys of all heads of each block, then values, of the first tokens: (blocks, tokens, width)."""
    first = (x[:, :, :WHOLE].double().transpose(1, 2).flatten(0, 1) for x in (k_BGSK, v_BGSV))
    parts = (x.unflatten(1, (layer.value_groups, -1)) for x in first)
    return torch.cat([part.flatten(2) for part in parts], dim=-1).transpose(0, 1)
