"""The strongest simple way to cut: directions and RoPE pairs weighted by the tokens that pass, as most tools do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.layout import layout_of
from headwise.families.sites import sites_of
from headwise.families.weights import read_attention
from headwise.linalg.coordinates import key_units
from headwise.linalg.spectra import weighted_basis
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import LayerShape
from headwise.reduction.widths.apply import Kept
from headwise.reduction.widths.directions import layer_tensors_of


def token_weighted(
    model: PreTrainedModel, layers: tuple[LayerShape, ...], plan: Plan, tensors: Mapping[str, Tensor]
) -> tuple[Plan, dict[int, Kept]]:
    """``plan`` with the RoPE pairs of most energy, and the directions that second moments of tokens say to keep."""
    changes, kept = list(plan.layers), {}
    for index, measured in layer_tensors_of(layers, plan, tensors).items():
        site, layer, change = sites_of(model)[index], layers[index], plan.layers[index]
        groups = torch.tensor(change.kept_groups(layer))
        w_o_HVD = read_attention(site, layer.rotary).w_o_HVD.detach().double().cpu()
        grams = (w_o_HVD @ w_o_HVD.mT).unflatten(0, (layer.kv_heads, -1)).sum(1)[groups]
        queries = measured["q_moment"].unflatten(0, (layer.kv_heads, -1)).sum(1)[groups]
        values = weighted_basis(grams, measured["v_moment"][groups])
        units = key_units(queries.double(), measured["k_moment"][groups].double(), layout_of(site, layer))
        pairs, free = change.pairs(layer), change.qk_dim - 2 * change.pairs(layer)
        changes[index] = _with_pairs(change, layer, units.energy_GU[:, : layer.rotary // 2], pairs)
        kept[index] = Kept(
            values.directions_NRR[..., : change.v_dim],
            values.duals_NRR[..., : change.v_dim],
            units.free.directions_NRR[..., :free],
            units.free.duals_NRR[..., :free],
        )
    return replace(plan, layers=tuple(changes)), kept


def _with_pairs(change: LayerPlan, layer: LayerShape, energy_GP: Tensor, count: int) -> LayerPlan:
    if not layer.rotary or 2 * count == layer.rotary:
        return change
    strongest = energy_GP.topk(count, dim=-1).indices.sort(dim=-1).values
    return replace(change, rope_pairs=tuple(map(tuple, strongest.tolist())))
