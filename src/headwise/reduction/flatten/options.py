"""Which neighbouring blocks may become one, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.files.errors import InputError
from headwise.planning.depth import Span
from headwise.planning.menus import MenuRequest
from headwise.records.change import Change
from headwise.records.shape import LayerShape
from headwise.reduction.flatten.change import Flatten

MEASURED = "flattened"
PAIR = Flatten(1)


def spans(request: MenuRequest) -> Iterator[Span]:
    """Each measured block with the next one, where both may change."""
    layers = dict(request.layers())
    for number, layer in layers.items():
        if MEASURED not in request.values(number) or number + 1 not in layers:
            continue
        try:
            PAIR.join([layer, layers[number + 1]], [(), ()], "")
        except InputError:
            continue
        loss = predicted_loss(layer, request.values(number), PAIR)
        yield Span(number, 2, 1, loss, ((PAIR,), ()))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The measured loss increase of a block side by side with the next one; 0 where it was not measured."""
    return values.get(MEASURED, 0.0)
