"""Which layers could do without their attention, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.planning.sensitivity import group_loss
from headwise.records.change import Change
from headwise.records.shape import LayerShape
from headwise.reduction.removal.change import Removal

WITHOUT = Removal("attention")


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer that may change the option to lose its attention.

    Some self-attention must stay in a model: where every layer could lose its own, the one felt most may not.
    """
    shape = request.profile.shape
    removable = {number: layer for number, layer in request.layers() if not layer.latent}
    losses = {number: sum(group_loss(layer, request.values(number))) for number, layer in removable.items()}
    needed = [number for number in shape.self_attention() if shape.layers[number].heads]
    if needed and all(number in removable for number in needed):
        del losses[max(needed, key=lambda number: losses[number])]
    for number, loss in losses.items():
        yield (number, ATTENTION), request.option(WITHOUT.shape(removable[number]), loss, lambda: (WITHOUT,))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of losing all heads of a measured layer; what else is in a block is not measured."""
    return sum(group_loss(layer, values))
