"""Which heads and widths a layer may keep, and what a cut is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headwise.planning.knapsack import Option
from headwise.planning.menus import ATTENTION, MenuItem, MenuRequest
from headwise.planning.sensitivity import best_split, cut_curve, group_loss, most_felt
from headwise.records.change import Change
from headwise.records.shape import LayerShape
from headwise.reduction.widths.change import Widths

Values = Mapping[str, Any]


def options(request: MenuRequest) -> Iterator[MenuItem]:
    """For each layer every number of key/value heads with every pair of widths, widest first.

    The key/value heads felt most stay, in each its RoPE pairs and free directions felt most. None where latents are
    offered instead: predictions for narrower heads undercount large cuts, and would win where they should not.
    """
    for number, layer in request.layers():
        if not (layer.latent or layer.absorbed or request.absorbs(number)):
            for option in _options(request, layer, request.values(number)):
                yield (number, ATTENTION), option


def widths_of(full: int, multiple: int) -> list[int]:
    """Widths to choose from, widest first: the full one, then multiples of ``multiple``."""
    return [full, *reversed(range(multiple, full, multiple))]


def predicted_loss(layer: LayerShape, values: Values, change: Change) -> float:
    """The predicted loss increase of cutting a measured layer so."""
    if not isinstance(change, Widths):
        raise TypeError(f"{change} is no change of widths.")
    kept, half = change.kept_groups(layer), layer.rotary // 2
    total = sum(loss for g, loss in enumerate(group_loss(layer, values)) if g not in kept)
    count = change.pairs(layer)
    for place, g in enumerate(kept):
        pairs, free = values["qk_unit_damage"][g][:half], values["qk_unit_damage"][g][half:]
        named = most_felt(pairs, count) if change.rope_pairs is None else change.rope_pairs[place]
        total += sum(loss for pair, loss in enumerate(pairs) if pair not in named)
        total += _cut(free, change.qk_dim - 2 * count) + _cut(values["v_unit_damage"][g], change.v_dim)
    return total


def _options(request: MenuRequest, layer: LayerShape, values: Values) -> Iterator[Option]:
    losses, multiple = group_loss(layer, values), request.multiple
    for count in range(layer.kv_heads, 0, -1):
        kept = most_felt(losses, count)
        lost = sum(loss for g, loss in enumerate(losses) if g not in kept)
        pairs, free = (cut_curve(units) for units in _key_units(layer, values, kept))
        v_losses = cut_curve([values["v_unit_damage"][g] for g in kept])
        for qk_dim in widths_of(layer.qk_dim, multiple)[: 1 if layer.norm == "affine" else None]:
            split = best_split(pairs, free, qk_dim)
            if split is None:
                continue
            narrow = _keep(layer, values, kept, qk_dim, layer.v_dim, split[1])[0].shape(layer)
            for v_dim in widths_of(layer.v_dim, multiple):
                if (count, qk_dim, v_dim) == layer.dims[1:]:
                    continue  # that is no change, which every menu begins with
                changes = partial(_keep, layer, values, kept, qk_dim, v_dim, split[1])
                loss = lost + split[0] + v_losses[v_dim]
                yield request.option(replace(narrow, v_dim=v_dim), loss, changes)


def _key_units(layer: LayerShape, values: Values, kept: tuple[int, ...]) -> tuple[list[list[float]], list[list[float]]]:
    """Losses of RoPE pairs and of free directions, in each of the key/value heads ``kept``."""
    half, units = layer.rotary // 2, [values["qk_unit_damage"][g] for g in kept]
    return [row[:half] for row in units], [row[half:] for row in units]


def _keep(
    layer: LayerShape, values: Values, kept: tuple[int, ...], qk_dim: int, v_dim: int, pairs: int
) -> tuple[Widths]:
    shared = layer.heads // layer.kv_heads
    rope_pairs = kept_heads = None
    if layer.rotary and qk_dim < layer.qk_dim:
        rope_pairs = tuple(most_felt(row, pairs) for row in _key_units(layer, values, kept)[0])
    if len(kept) < layer.kv_heads:
        kept_heads = tuple(shared * g + head for g in kept for head in range(shared))
    return (Widths(shared * len(kept), len(kept), qk_dim, v_dim, rope_pairs, kept_heads),)


def _cut(units: Sequence[float], width: int) -> float:
    return sum(sorted(units)[: len(units) - width])
