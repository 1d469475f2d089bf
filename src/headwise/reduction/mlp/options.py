"""How many channels an MLP may keep, and what a cut is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headwise.planning.menus import MenuItem, MenuRequest
from headwise.records.change import Change
from headwise.records.profile import MLP_PARTS, PARTS
from headwise.records.shape import LayerShape
from headwise.reduction.mlp.change import Channels

PART = "mlp"
BEND = 2.5  # large cuts cost more than what channels cost one by one: about by this power of it


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each measured MLP up to 64 numbers of channels, none among them, where that saves anything."""
    for number, layer in request.layers():
        values = request.values(number)
        if layer.mlp is None or "mlp_damage" not in values or not request.saves(layer, layer.with_channels(0)):
            continue
        for channels in _counts(layer.mlp.channels, request.multiple):
            change = Channels(channels)
            loss = predicted_loss(layer, values, change)
            yield (number, PART), request.option(change.shape(layer), loss, partial(tuple, (change,)))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of cutting the MLP of a measured layer so; 0 where it was not measured.

    Between the losses of single channels, which hold for small cuts, and what the model loses without the whole MLP.
    """
    if not isinstance(change, Channels):
        raise TypeError(f"{change} is no change of an MLP.")
    curve: Sequence[float] = values.get("mlp_damage", ())
    if layer.mlp is None or not curve:
        return 0.0
    place = change.channels * MLP_PARTS / layer.mlp.channels
    below = min(int(place), MLP_PARTS - 1)
    apart, alone = curve[below] + (place - below) * (curve[below + 1] - curve[below]), curve[0]
    if not alone or "left_out" not in values:
        return apart
    return apart + max(0.0, values["left_out"][PARTS.index(PART)] - alone) * (apart / alone) ** BEND


def _counts(full: int, multiple: int) -> list[int]:
    """Channels to choose from, most first: multiples of ``multiple`` near each sixty-fourth of all."""
    near = {round(full * part / MLP_PARTS / multiple) * multiple for part in range(MLP_PARTS)}
    return sorted((count for count in near if count < full), reverse=True)
