"""Which RoPE pairs to keep where a plan does not name them: those that add most to the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.linalg.joint import pair_energy
from headwise.records.plan import Changes, Plan
from headwise.reduction.apply import Statistics, as_met
from headwise.reduction.widths.apply import by_group, keep_heads
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.token_weighted import token_pairs


def settle(model: PreTrainedModel, plan: Plan, statistics: Mapping[int, Statistics | None], *, shared: bool) -> Plan:
    """``plan`` with every kept RoPE pair named: each key/value head's own, or one set ``shared`` by all of them.

    Second moments of tokens name them anew where they decide; else the weights name those that nobody has.
    """
    sites, shape = sites_of(model), shape_of(model)
    settled, counts, energies = list(plan.layers), {}, {}
    for index, changes in enumerate(plan.layers):
        change, measured = widths_among(changes), statistics.get(index)
        if change is None or not shape.layers[index].rotary:
            continue
        weights, layer = as_met(sites[index], shape.layers[index], changes, Widths.kind)
        if measured is not None and measured.method == "token-weighted" and change.narrower(layer):
            change = token_pairs(change, layer, measured)
            settled[index] = _exchanged(changes, change)
        counts[index] = change.pairs(layer)
        if change.rope_pairs is None and counts[index] < layer.rotary // 2:
            kept = keep_heads(weights, change, layer)
            queries = by_group(kept.w_q_HKD, change.kv_heads)
            energies[index] = pair_energy(queries, kept.w_k_GKD.mT, layer.rotary // 2)
    if shared and energies:
        total_P = torch.stack([energy_GP.square().sum(0) for energy_GP in energies.values()]).sum(0)
        energies = {index: total_P.expand_as(energy_GP) for index, energy_GP in energies.items()}
    for index, energy_GP in energies.items():
        named = tuple(_strongest(energy_P, counts[index]) for energy_P in energy_GP)
        settled[index] = tuple(
            replace(each, rope_pairs=named) if isinstance(each, Widths) else each for each in settled[index]
        )
    return replace(plan, layers=tuple(settled))


def widths_among(changes: Changes) -> Widths | None:
    """The change of widths among the changes of a layer, if there is one."""
    return next((change for change in changes if isinstance(change, Widths)), None)


def _exchanged(changes: Changes, own: Widths) -> Changes:
    return tuple(own if isinstance(change, Widths) else change for change in changes)


def _strongest(energy_P: Tensor, count: int) -> tuple[int, ...]:
    return tuple(energy_P.topk(count).indices.sort().values.tolist())
