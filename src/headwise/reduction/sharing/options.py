"""How many key/value heads may be merged into one, how wide that one may be, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from headwise.planning.knapsack import Option
from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.planning.sensitivity import best_split, cut_curve, most_felt
from headwise.records.change import Change, Pairs
from headwise.records.shape import LayerShape
from headwise.reduction.sharing.change import Sharing
from headwise.reduction.widths.options import widths_of

Values = Mapping[str, Any]


class Units(NamedTuple):
    """What losing each unit of each merged head would cost: RoPE pairs by frequency, free keys, values."""

    pairs: list[list[float]]
    free: list[list[float]]
    values: list[list[float]]


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer whose heads were measured together every number of them merged, with every pair of widths.

    Only where that is asked for, and the cache is not rounded: bits cost less there, and leave the weights as many as
    they are.
    """
    for number, layer in request.layers() if request.merge and request.cache == "none" else ():
        values = request.values(number)
        for joined in layer.joinable if "shared_k_damage" in values else ():
            for option in _options(request, layer, joined, units_of(layer, values, joined)):
                yield (number, ATTENTION), option


def predicted_loss(layer: LayerShape, values: Values, change: Change) -> float:
    """The predicted loss increase of merging the heads of a measured layer so; nothing measured, nothing predicted."""
    if not isinstance(change, Sharing):
        raise TypeError(f"{change} is no merging of heads.")
    if change.joined not in layer.joinable or "shared_k_damage" not in values:
        return 0.0
    units, named = units_of(layer, values, change.joined), change.pairs(layer)
    total = _cut(units.free, change.qk_dim - 2 * len(named[0])) + _cut(units.values, change.v_dim)
    for row, pairs in zip(units.pairs, named, strict=True):
        for pair in range(layer.rotary // 2):
            own = row[change.joined * pair : change.joined * (pair + 1)]
            total += _cut([own], pairs.count(pair))
    return total


def units_of(layer: LayerShape, values: Values, joined: int) -> Units:
    """What a measured layer says of losing units once so many of its heads are merged into one."""
    size, half = layer.joinable.index(joined), joined * layer.rotary // 2
    keys = _rows(values["shared_k_damage"][size], joined * layer.units)
    return Units(
        [row[:half] for row in keys],
        [row[half:] for row in keys],
        _rows(values["shared_v_damage"][size], joined * layer.v_dim),
    )


def _options(request: MenuRequest, layer: LayerShape, joined: int, units: Units) -> Iterator[Option]:
    pairs, free, v_losses = (cut_curve(rows) for rows in units)
    for qk_dim in widths_of(joined * layer.qk_dim, request.multiple):
        split = best_split(pairs, free, qk_dim)
        if split is None:
            continue
        named = _named(layer, joined, units, split[1])
        for v_dim in widths_of(joined * layer.v_dim, request.multiple):
            if (qk_dim, v_dim) != (joined * layer.qk_dim, joined * layer.v_dim):
                change = Sharing(joined, qk_dim, v_dim, named)
                yield request.option(change.shape(layer), split[0] + v_losses[v_dim], partial(_only, change))


def _named(layer: LayerShape, joined: int, units: Units, count: int) -> Pairs | None:
    """The frequencies of the ``count`` pairs of each merged head that are felt most."""
    if not layer.rotary:
        return None
    return tuple(tuple(unit // joined for unit in most_felt(row, count)) for row in units.pairs)


def _rows(flat: Sequence[float], width: int) -> list[list[float]]:
    return [list(flat[start : start + width]) for start in range(0, len(flat), width)]


def _cut(rows: Sequence[Sequence[float]], kept: int) -> float:
    return sum(sum(sorted(row)[: len(row) - kept]) for row in rows)


def _only(change: Sharing) -> tuple[Sharing]:
    return (change,)
