"""Which layers could do without their attention, or be dropped, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.planning.menus import ATTENTION, BLOCK, MenuItem, MenuRequest
from headwise.planning.sensitivity import group_loss
from headwise.records.change import Change
from headwise.records.profile import PARTS
from headwise.records.shape import LayerShape
from headwise.reduction.removal.change import Removal

WITHOUT, DROPPED = Removal("attention"), Removal("block")
MEASURED = "left_out"


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer that may change the option to lose its attention, or its block where MLPs or blocks count.

    Some self-attention must stay in a model: where every layer could lose its own, the one felt most may not.
    """
    shape = request.profile.shape
    removable = {number: layer for number, layer in request.layers() if not (layer.latent or layer.absorbed)}
    losses = {number: sum(group_loss(layer, request.values(number))) for number, layer in removable.items()}
    needed = [number for number in shape.self_attention() if shape.layers[number].heads]
    everywhere = bool(needed) and all(number in removable for number in needed)
    if everywhere:
        del losses[max(needed, key=lambda number: losses[number])]
    for number, loss in losses.items():
        yield (number, ATTENTION), request.option(WITHOUT.shape(removable[number]), loss, lambda: (WITHOUT,))

    blocks = {
        number: predicted_loss(layer, request.values(number), DROPPED)
        for number, layer in removable.items()
        if MEASURED in request.values(number)
    }
    needed_most = max(needed, key=lambda number: blocks.get(number, 0.0)) if everywhere else None
    for number, loss in blocks.items():
        layer = removable[number]
        if request.saves(layer, layer.with_channels(0)):
            if number in losses:
                yield (number, BLOCK), request.option(None, loss, lambda: (DROPPED,))
        elif request.saves(layer, None) and not request.saves(layer, WITHOUT.shape(layer)) and number != needed_most:
            yield (number, ATTENTION), request.option(None, loss, lambda: (DROPPED,))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of losing all heads of a measured layer, or the measured one of losing its block."""
    if change == DROPPED and MEASURED in values:
        return values[MEASURED][PARTS.index("block")]
    return sum(group_loss(layer, values))
