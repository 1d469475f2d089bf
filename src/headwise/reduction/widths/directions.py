"""Which directions of a layer stay when its heads get narrower, from the statistics of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.files.errors import InputError
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.widths.change import Widths


@dataclass(frozen=True, slots=True)
class Kept:
    """Directions that stay, one per column, and their duals: values of each group, and its free query/key coordinates.

    ``x -> directions duals^T x`` is what is left of a vector.
    """

    v_directions_GVR: Tensor
    v_duals_GVR: Tensor
    qk_directions_GFR: Tensor
    qk_duals_GFR: Tensor


def kept_directions(change: Widths, layer: LayerShape, statistics: Statistics) -> Kept:
    """The directions of ``layer`` that the loss feels most, by the bases and the Fisher information of a profile."""
    measured = measured_of(change, layer, statistics)
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


def measured_of(change: Widths, layer: LayerShape, statistics: Statistics) -> Mapping[str, Tensor]:
    """What a profile holds on a layer that is to get narrower; raises where that does not tell what stays."""
    index = statistics.index
    if change.merges(layer):
        raise InputError(f"Layer {index} of the plan merges key/value heads: only the `method` svd does that.")
    measured = statistics.require()
    if measured["v_fisher"].shape[:2] != (layer.kv_heads, layer.v_dim):
        raise InputError(
            f"Layer {index} of the plan has other key/value heads than were measured once its widths are cut: only "
            "the `method` svd does that."
        )
    return measured


def _most_felt(fisher_GUU: Tensor, count: int) -> Tensor:
    return fisher_GUU.diagonal(dim1=-2, dim2=-1).topk(count, dim=-1).indices.sort(dim=-1).values


def _columns(matrix_GRU: Tensor, index_GC: Tensor) -> Tensor:
    return matrix_GRU.gather(2, index_GC[:, None].expand(-1, matrix_GRU.shape[1], -1))
