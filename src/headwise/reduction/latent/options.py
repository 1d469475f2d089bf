"""Joint latents of any size, their coordinates rounded, and what they are predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from headwise.planning.filling import digit_rows, fillings, rounding_loss
from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.records.change import Change
from headwise.records.packing import WHOLE_BITS, WIDTHS
from headwise.records.shape import LayerShape
from headwise.reduction.latent.change import Latent

ALLOWED: Mapping[str, tuple[int, ...]] = {"latent": WIDTHS, "whole": (0, WHOLE_BITS)}


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer whose cache can be packed a latent of its keys and values, finest first.

    Only where the request allows it: keys that are made anew take time at every step.
    """
    widths = ALLOWED.get(request.cache, ())
    for number, layer in request.layers() if widths else ():
        rows = request.values(number).get("kv_bit_damage", ())
        for bits, loss in fillings([loss for row in rows for loss in row], widths):
            change = Latent(digit_rows(bits, layer.joint_group_width))
            yield (number, ATTENTION), request.option(change.shape(layer), loss, partial(_only, change))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of such a latent in a measured layer."""
    if not isinstance(change, Latent):
        raise TypeError(f"{change} is no latent.")
    return rounding_loss(values["kv_bit_damage"], change.coordinates) if "kv_bit_damage" in values else 0.0


def _only(change: Latent) -> tuple[Latent]:
    return (change,)
