"""The RoPE pairs of merged heads named where a plan leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transformers import PreTrainedModel

from headwise.families.shapes import shape_of
from headwise.records.change import Change
from headwise.records.plan import Plan
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.sharing.change import Sharing


def settle(model: PreTrainedModel, plan: Plan, statistics: Mapping[int, Statistics | None], *, shared: bool) -> Plan:
    """``plan`` with the pairs of every merged head named."""
    layers = zip(shape_of(model).layers, plan.layers, strict=True)
    return replace(plan, layers=tuple(tuple(_named(change, layer) for change in changes) for layer, changes in layers))


def _named(change: Change, layer: LayerShape) -> Change:
    """Merging is the first thing done to a layer that keeps its heads: ``layer`` is as it was."""
    if isinstance(change, Sharing) and layer.rotary:
        return replace(change, rope_pairs=change.pairs(layer))
    return change
