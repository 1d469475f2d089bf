"""How many bits each cached coordinate may get, and what rounding is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from headwise.planning.knapsack import Option
from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.records.change import Change
from headwise.records.packing import NOISE, WIDTHS
from headwise.records.shape import LayerShape
from headwise.reduction.bits.change import Bits

# An error that shrinks a coordinate for all tokens alike adds up over them, noise does not: of the power e that
# rounding loses, e^2 is shrinkage, and costs so much more.
SHRINKAGE = 4.0
COST = {bits: noise + (SHRINKAGE - 1) * noise**2 for bits, noise in NOISE.items()}
ALLOWED: Mapping[str, tuple[int, ...]] = {"mixed": WIDTHS, "int8": (0, 8), "int4": (0, 4), "none": ()}
STEPS = 96  # options of a layer: enough for a smooth curve

Rows = Sequence[Sequence[float]]


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer whose cache can be packed its coordinates rounded, finest first.

    Bits go where the next one saves most, so the options of a layer are the steps of reverse water-filling.
    """
    widths = ALLOWED[request.cache]
    if not widths:
        return
    for number, layer in request.layers():
        values = request.values(number)
        if "k_bit_damage" in values and "v_bit_damage" in values:
            losses = [loss for name in ("k_bit_damage", "v_bit_damage") for row in values[name] for loss in row]
            for bits, loss in _fillings(losses, widths):
                change = _change(layer, bits)
                yield (number, ATTENTION), Option(request.cost(change.shape(layer)), loss, partial(_only, change))


def predicted_loss(layer: LayerShape, values: Mapping[str, Any], change: Change) -> float:
    """The predicted loss increase of rounding a measured layer so."""
    if not isinstance(change, Bits):
        raise TypeError(f"{change} is no change of bits.")
    if "k_bit_damage" not in values:
        return 0.0
    rows = zip((*values["k_bit_damage"], *values["v_bit_damage"]), (*change.keys, *change.values), strict=True)
    return sum(loss * COST[int(digit)] for losses, digits in rows for loss, digit in zip(losses, digits, strict=True))


def _fillings(losses: Sequence[float], widths: Sequence[int]) -> Iterator[tuple[list[int], float]]:
    """Bits of all coordinates and the loss they cost, from all at the most bits down to hardly any."""
    steps = [(low, high, (COST[low] - COST[high]) / (high - low)) for low, high in pairwise(widths)]
    moves = sorted((loss * rate, place, low, high) for place, loss in enumerate(losses) for low, high, rate in steps)
    bits = [widths[-1]] * len(losses)
    spent = sum(loss * COST[widths[-1]] for loss in losses)
    stride = max(1, len(moves) // STEPS)
    for count, (_, place, low, high) in enumerate(moves):
        if not count % stride:
            yield bits.copy(), spent
        bits[place] = low
        spent += losses[place] * (COST[low] - COST[high])


def _change(layer: LayerShape, bits: Sequence[int]) -> Bits:
    digits = "".join(map(str, bits))
    split = layer.kv_heads * layer.qk_dim
    return Bits(_rows(digits[:split], layer.qk_dim), _rows(digits[split:], layer.value_group_width))


def _rows(digits: str, width: int) -> tuple[str, ...]:
    return tuple(digits[start : start + width] for start in range(0, len(digits), width))


def _only(change: Bits) -> tuple[Bits]:
    return (change,)
