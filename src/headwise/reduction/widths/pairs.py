"""Which RoPE pairs to keep where a plan does not name them: those that can add most to the logits, by weights alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.sites import Site, sites_of
from headwise.families.weights import read_attention
from headwise.linalg.joint import pair_energy
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import LayerShape, ModelShape
from headwise.reduction.widths.apply import by_group, keep_heads


def name_pairs(model: PreTrainedModel, shape: ModelShape, plan: Plan, *, shared: bool) -> Plan:
    """``plan`` with every kept RoPE pair named: each key/value head's own, or one set ``shared`` by all of them."""
    layers = list(zip(sites_of(model), shape.layers, plan.layers, strict=True))
    open_layers = [i for i, (_, layer, change) in enumerate(layers) if _unnamed(layer, change)]
    if not open_layers:
        return plan
    energies = {i: _energy(*layers[i]) for i in open_layers}
    if shared:
        total_P = torch.stack([energy_GP.square().sum(0) for energy_GP in energies.values()]).sum(0)
        energies = {i: total_P.expand_as(energy_GP) for i, energy_GP in energies.items()}
    named = list(plan.layers)
    for i, energy_GP in energies.items():
        count = plan.layers[i].pairs(shape.layers[i])
        named[i] = replace(plan.layers[i], rope_pairs=tuple(_strongest(energy_P, count) for energy_P in energy_GP))
    return replace(plan, layers=tuple(named))


def _unnamed(layer: LayerShape, change: LayerPlan) -> bool:
    fewer = change.heads and not change.dropped and change.pairs(layer) < layer.rotary // 2
    return bool(fewer and change.rope_pairs is None)


def _energy(site: Site, layer: LayerShape, change: LayerPlan) -> Tensor:
    weights = keep_heads(read_attention(site, layer.rotary), change, layer)
    queries = by_group(weights.w_q_HKD, change.kv_heads)
    return pair_energy(queries, weights.w_k_GKD.mT, layer.rotary // 2)


def _strongest(energy_P: Tensor, count: int) -> tuple[int, ...]:
    return tuple(energy_P.topk(count).indices.sort().values.tolist())
