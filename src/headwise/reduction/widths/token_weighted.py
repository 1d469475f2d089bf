"""The strongest simple way to cut: directions and RoPE pairs weighted by the tokens that pass, as most tools do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.weights import AttentionWeights
from headwise.files.errors import InputError
from headwise.linalg.coordinates import Layout, Units, key_units
from headwise.linalg.spectra import weighted_basis
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.directions import Kept, measured_of


def token_pairs(change: Widths, layer: LayerShape, statistics: Statistics) -> Widths:
    """``change`` with the RoPE pairs of most energy."""
    units = _key_units(change, layer, measured_of(change, layer, statistics))
    count = change.pairs(layer)
    if not layer.rotary or 2 * count == layer.rotary:
        return change
    strongest = units.energy_GU[:, : layer.rotary // 2].topk(count, dim=-1).indices.sort(dim=-1).values
    return replace(change, rope_pairs=tuple(map(tuple, strongest.tolist())))


def token_directions(weights: AttentionWeights, change: Widths, layer: LayerShape, statistics: Statistics) -> Kept:
    """The directions that second moments of tokens say to keep."""
    measured = measured_of(change, layer, statistics)
    groups = torch.tensor(change.kept_groups(layer))
    w_o_HVD = weights.w_o_HVD.detach().double().cpu()
    grams = (w_o_HVD @ w_o_HVD.mT).unflatten(0, (layer.kv_heads, -1)).sum(1)[groups]
    values = weighted_basis(grams, measured["v_moment"][groups])
    units, free = _key_units(change, layer, measured), change.qk_dim - 2 * change.pairs(layer)
    return Kept(
        values.directions_NRR[..., : change.v_dim],
        values.duals_NRR[..., : change.v_dim],
        units.free.directions_NRR[..., :free],
        units.free.duals_NRR[..., :free],
    )


def _key_units(change: Widths, layer: LayerShape, measured: Mapping[str, Tensor]) -> Units:
    if measured["q_moment"].shape[0] != layer.heads:
        raise InputError("Second moments of tokens were measured with other query heads than are left here.")
    groups = torch.tensor(change.kept_groups(layer))
    queries = measured["q_moment"].unflatten(0, (layer.kv_heads, -1)).sum(1)[groups]
    layout = Layout.halves(0, layer.rotary, layer.qk_dim)
    return key_units(queries.double(), measured["k_moment"][groups].double(), layout)
