"""Which directions of each layer stay under a plan, from the bases and the Fisher information of a profile."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.files.errors import InputError
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import LayerShape, ModelShape
from headwise.reduction.widths.apply import Kept


def kept_directions(shape: ModelShape, plan: Plan, tensors: Mapping[str, Tensor]) -> dict[int, Kept]:
    """For each layer that ``plan`` cuts, the directions the loss feels most. ``tensors`` are those of the profile."""
    measured = layer_tensors_of(shape.layers, plan, tensors)
    return {index: _kept(shape.layers[index], plan.layers[index], mine) for index, mine in measured.items()}


def layer_tensors_of(
    layers: tuple[LayerShape, ...], plan: Plan, tensors: Mapping[str, Tensor]
) -> dict[int, dict[str, Tensor]]:
    """What a profile holds on each layer that ``plan`` makes narrower, by name."""
    found = {}
    for index, (layer, change) in enumerate(zip(layers, plan.layers, strict=True)):
        narrower = change.qk_dim < layer.qk_dim or change.v_dim < layer.v_dim
        if change.heads and not change.dropped and narrower:
            if change.merges(layer):
                raise InputError(f"Layer {index} of the plan merges key/value heads: only --method svd does that.")
            start = f"{index}."
            found[index] = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            if not found[index]:
                raise InputError(f"The profile has nothing on layer {index}: it was made for another model.")
    return found


def _kept(layer: LayerShape, change: LayerPlan, measured: Mapping[str, Tensor]) -> Kept:
    groups = torch.tensor(change.kept_groups(layer))
    pairs, free = layer.rotary // 2, change.qk_dim - 2 * change.pairs(layer)
    values = _most_felt(measured["v_fisher"][groups], change.v_dim)
    queries = _most_felt(measured["qk_fisher"][groups, pairs:, pairs:], free)
    return Kept(
        _columns(measured["v_directions"][groups], values),
        _columns(measured["v_duals"][groups], values),
        _columns(measured["qk_directions"][groups], queries),
        _columns(measured["qk_duals"][groups], queries),
    )


def _most_felt(fisher_GUU: Tensor, count: int) -> Tensor:
    return fisher_GUU.diagonal(dim1=-2, dim2=-1).topk(count, dim=-1).indices.sort(dim=-1).values


def _columns(matrix_GRU: Tensor, index_GC: Tensor) -> Tensor:
    return matrix_GRU.gather(2, index_GC[:, None].expand(-1, matrix_GRU.shape[1], -1))
