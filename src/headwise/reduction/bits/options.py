"""How many bits each cached coordinate may get, and what rounding is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headwise.planning.filling import digit_rows, fillings, rounding_loss
from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.records.change import Change
from headwise.records.packing import WHOLE_BITS, WIDTHS
from headwise.records.shape import LayerShape
from headwise.reduction.bits.change import Bits

ALLOWED: Mapping[str, tuple[int, ...]] = {
    "mixed": WIDTHS,
    "latent": WIDTHS,
    "whole": (0, WHOLE_BITS),
    "int8": (0, 8),
    "int4": (0, 4),
    "none": (),
}


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer whose cache can be packed its coordinates rounded, finest first."""
    widths = ALLOWED[request.cache]
    if not widths:
        return
    for number, layer in request.layers():
        values = request.values(number)
        if "k_bit_damage" in values and "v_bit_damage" in values:
            losses = [loss for name in ("k_bit_damage", "v_bit_damage") for row in values[name] for loss in row]
            for bits, loss in fillings(losses, widths):
                change = _change(layer, bits)
                yield (number, ATTENTION), request.option(change.shape(layer), loss, partial(_only, change))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of rounding a measured layer so."""
    if not isinstance(change, Bits):
        raise TypeError(f"{change} is no change of bits.")
    if "k_bit_damage" not in values:
        return 0.0
    return rounding_loss((*values["k_bit_damage"], *values["v_bit_damage"]), (*change.keys, *change.values))


def _change(layer: LayerShape, bits: Sequence[int]) -> Bits:
    cached = layer.cached
    split = cached.kv_heads * cached.qk_dim
    return Bits(digit_rows(bits[:split], cached.qk_dim), digit_rows(bits[split:], cached.value_group_width))


def _only(change: Bits) -> tuple[Bits]:
    return (change,)
