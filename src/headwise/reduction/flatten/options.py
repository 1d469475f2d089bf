"""Which neighbouring blocks may become one, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.planning.menus import MenuItem, MenuRequest
from headwise.records.change import Change
from headwise.records.shape import LayerShape


def options(request: MenuRequest) -> Iterator[MenuItem]:
    return iter(())


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The measured loss increase of a block side by side with the next one; 0 where it was not measured."""
    return values.get("flattened", 0.0)
