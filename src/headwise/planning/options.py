"""What every layer of a profiled model may keep, at what price and predicted damage, and the plan that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from headwise.planning.damage import best_split, cut_curve, group_damage, most_felt
from headwise.planning.knapsack import Option, frontier
from headwise.records.plan import LayerPlan
from headwise.records.profile import Profile
from headwise.records.shape import LayerShape

Price = Callable[[LayerShape], int]


def offers_of(profile: Profile, price: Price, multiple: int = 8, protect: Collection[int] = ()) -> list[list[Option]]:
    """Each layer's `frontier` of options; whole only: those in ``protect``, latent or unmeasured ones.

    Some self-attention must stay in a model: where every layer could lose its own, the one felt most does not offer to.
    """
    shape = profile.shape
    whole = {i for i, layer in enumerate(shape.layers) if layer.latent or not profile.layers[i].values} | set(protect)
    needed = [i for i in shape.self_attention() if shape.layers[i].heads]
    stays = None
    if whole.isdisjoint(needed):
        stays = max(needed, key=lambda i: sum(group_damage(shape.layers[i], profile.layers[i].values)))
    return [
        [_full(layer, price)]
        if i in whole
        else frontier(_options(layer, profile.layers[i].values, price, multiple, removable=i != stays))
        for i, layer in enumerate(shape.layers)
    ]


def widths_of(full: int, multiple: int) -> list[int]:
    """Widths on offer, widest first: the full one, then multiples of ``multiple``."""
    return [full, *reversed(range(multiple, full, multiple))]


def keep(layer: LayerShape, values: Mapping[str, Any], option: Option) -> LayerPlan:
    """The plan of a layer that keeps ``option``: the key/value heads felt most, in each its RoPE pairs felt most."""
    if (option.kv_heads, option.qk_dim, option.v_dim) == (layer.kv_heads, layer.qk_dim, layer.v_dim):
        return LayerPlan.full(layer)
    if not option.kv_heads:
        return LayerPlan(0, 0, 0, 0)
    kept = most_felt(group_damage(layer, values), option.kv_heads)
    pairs, free = (cut_curve(units) for units in _key_units(layer, values, kept))
    split = best_split(pairs, free, option.qk_dim)
    return _keep(layer, values, kept, option.qk_dim, option.v_dim, split[1] if split else 0)


def _options(
    layer: LayerShape, values: Mapping[str, Any], price: Price, multiple: int, *, removable: bool
) -> list[Option]:
    losses = group_damage(layer, values)
    options = []
    for count in range(layer.kv_heads, 0, -1):
        kept = most_felt(losses, count)
        lost = sum(loss for g, loss in enumerate(losses) if g not in kept)
        pairs, free = (cut_curve(units) for units in _key_units(layer, values, kept))
        v_damage = cut_curve([values["v_unit_damage"][g] for g in kept])
        for qk_dim in widths_of(layer.qk_dim, multiple)[: 1 if layer.norm == "affine" else None]:
            split = best_split(pairs, free, qk_dim)
            if split is None:
                continue
            narrow = layer.planned(_keep(layer, values, kept, qk_dim, layer.v_dim, split[1]))
            options += [
                Option(count, qk_dim, v_dim, price(replace(narrow, v_dim=v_dim)), lost + split[0] + v_damage[v_dim])
                for v_dim in widths_of(layer.v_dim, multiple)
            ]
    if removable:
        removed = layer.planned(LayerPlan(0, 0, 0, 0))
        options.append(Option(0, 0, 0, price(removed), sum(losses)))
    return options


def _full(layer: LayerShape, price: Price) -> Option:
    return Option(layer.kv_heads, layer.qk_dim, layer.v_dim, price(layer), 0.0)


def _key_units(
    layer: LayerShape, values: Mapping[str, Any], kept: tuple[int, ...]
) -> tuple[list[list[float]], list[list[float]]]:
    """Damages of RoPE pairs and of free directions, in each of the key/value heads ``kept``."""
    half, units = layer.rotary // 2, [values["qk_unit_damage"][g] for g in kept]
    return [row[:half] for row in units], [row[half:] for row in units]


def _keep(
    layer: LayerShape, values: Mapping[str, Any], kept: tuple[int, ...], qk_dim: int, v_dim: int, pairs: int
) -> LayerPlan:
    shared = layer.heads // layer.kv_heads
    rope_pairs = kept_heads = None
    if layer.rotary and qk_dim < layer.qk_dim:
        rope_pairs = tuple(most_felt(row, pairs) for row in _key_units(layer, values, kept)[0])
    if len(kept) < layer.kv_heads:
        kept_heads = tuple(shared * g + head for g in kept for head in range(shared))
    return LayerPlan(shared * len(kept), len(kept), qk_dim, v_dim, rope_pairs, kept_heads)
