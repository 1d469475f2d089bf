"""Weights and changes in, weights out: the changes of one layer, carried out one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from headwise.families.mlp import MlpWeights
from headwise.families.sites import Site
from headwise.families.weights import AttentionWeights, read_attention
from headwise.files.errors import InputError
from headwise.records.change import Change
from headwise.records.shape import LayerShape
from headwise.reduction.kinds import kind_of

Method = Literal["weighted", "token-weighted", "svd"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a profile holds on layer ``index``, by name, and by which ``method`` it decides what stays."""

    index: int
    tensors: Mapping[str, Tensor]
    method: Method

    def require(self) -> Mapping[str, Tensor]:
        """The tensors, or an `InputError` where there are none."""
        if not self.tensors:
            raise InputError(f"The profile has nothing on layer {self.index}: it was made for another model.")
        return self.tensors


def statistics_of(tensors: Mapping[str, Tensor] | None, method: Method, index: int) -> Statistics | None:
    """The part of a profile's ``tensors`` on one layer; None where weights alone decide."""
    if tensors is None or method == "svd":
        return None
    start = f"{index}."
    own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    return Statistics(index, own, method)


def apply_changes(
    weights: AttentionWeights, layer: LayerShape, changes: Iterable[Change], statistics: Statistics | None = None
) -> tuple[AttentionWeights | None, LayerShape | None]:
    """Weights and shape of an attention layer after ``changes``; no weights where nothing of it is left."""
    after: AttentionWeights | None = weights
    shape: LayerShape | None = layer
    for change in changes:
        if after is None or shape is None:
            break
        if change.acts_on == "attention":
            after = kind_of(change).part("apply").apply(after, change, shape, statistics)
        shape = change.shape(shape)
    return after, shape


def apply_to_mlp(
    weights: MlpWeights, layer: LayerShape, changes: Iterable[Change], statistics: Statistics | None = None
) -> MlpWeights | None:
    """Weights of the MLP of ``layer`` after ``changes``; None where nothing of it is left."""
    after: MlpWeights | None = weights
    for change in changes:
        if change.acts_on == "mlp" and after is not None:
            after = kind_of(change).part("apply").apply(after, change, layer, statistics)
    return after


def as_met(site: Site, layer: LayerShape, changes: Iterable[Change], kind: str) -> tuple[AttentionWeights, LayerShape]:
    """Weights and shape of a layer as its change of ``kind`` meets them, behind those that come before it."""
    earlier = []
    for change in changes:
        if change.kind == kind:
            break
        earlier.append(change)
    weights, shape = apply_changes(read_attention(site, layer.rotary), layer, earlier)
    if weights is None or shape is None:
        raise InputError(f"Nothing of {site.path} is left for a change of {kind}.")
    return weights, shape
