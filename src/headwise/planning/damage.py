"""What a cut is predicted to cost, from what a profile measured of a layer, and what to expect of that prediction.

``values`` are a `LayerProfile`'s; units of the keys are RoPE pairs first, then free directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from headwise.records.plan import LayerPlan
from headwise.records.profile import Check, Profile
from headwise.records.shape import LayerShape


def group_damage(layer: LayerShape, values: Mapping[str, Any]) -> list[float]:
    """For each key/value head the damage of losing it with its query heads.

    The larger of two second-order estimates, by heads and by value directions, as both undercount so large a cut.
    """
    shared = layer.heads // layer.kv_heads
    heads, units = values["head_damage"], values["v_unit_damage"]
    return [max(sum(heads[shared * g : shared * (g + 1)]), sum(units[g])) for g in range(layer.kv_heads)]


def cut_curve(units: Sequence[Sequence[float]]) -> list[float]:
    """Damage of keeping 0, 1, ..., all units in every row, each row's least felt cut first."""
    felt = [sum(column) for column in zip(*(sorted(row) for row in units), strict=True)]
    return list(accumulate(felt, initial=0.0))[::-1]


def best_split(pairs: Sequence[float], free: Sequence[float], width: int) -> tuple[float, int] | None:
    """The least damage at ``width`` by both curves, and the RoPE pairs it keeps; None: whole pairs do not fit."""
    fitting = [count for count in range(len(pairs)) if 0 <= width - 2 * count < len(free)]
    return min(((pairs[count] + free[width - 2 * count], count) for count in fitting), default=None)


def most_felt(damage: Sequence[float], count: int) -> tuple[int, ...]:
    """Numbers of the ``count`` units felt most, in their own order."""
    return tuple(sorted(sorted(range(len(damage)), key=lambda unit: -damage[unit])[:count]))


def layer_damage(layer: LayerShape, values: Mapping[str, Any], change: LayerPlan) -> float:
    """The predicted damage of ``change`` to a measured layer; nothing measured, nothing predicted."""
    if not values or not layer.heads:
        return 0.0
    kept, half = change.kept_groups(layer), layer.rotary // 2
    total = sum(damage for g, damage in enumerate(group_damage(layer, values)) if g not in kept)
    count = change.pairs(layer) if kept else 0
    for place, g in enumerate(kept):
        pairs, free = values["qk_unit_damage"][g][:half], values["qk_unit_damage"][g][half:]
        named = most_felt(pairs, count) if change.rope_pairs is None else change.rope_pairs[place]
        total += sum(damage for pair, damage in enumerate(pairs) if pair not in named)
        total += _cut(free, change.qk_dim - 2 * count) + _cut(values["v_unit_damage"][g], change.v_dim)
    return total


def plan_damage(profile: Profile, layers: Sequence[LayerPlan]) -> float:
    """The predicted damage of a whole plan."""
    measured = zip(profile.shape.layers, profile.layers, layers, strict=True)
    return sum(layer_damage(layer, found.values, change) for layer, found, change in measured)


def expected(checks: Sequence[Check], predicted: float) -> float | None:
    """What a prediction is worth: times what cuts measured of their prediction, between the nearest ``checks``.

    Their ratio is interpolated over the logarithm of the prediction, and beyond the first and last one stays as it is
    there. None without checks.
    """
    known = sorted((math.log(check.predicted), check.measured / check.predicted) for check in checks if check.predicted)
    if not known:
        return None
    if predicted <= 0:
        return 0.0
    place = min(max(math.log(predicted), known[0][0]), known[-1][0])
    for (low, first), (high, second) in pairwise(known):
        if low <= place <= high and low < high:
            return predicted * (first + (second - first) * (place - low) / (high - low))
    return predicted * known[0][1]


def expected_agreement(checks: Sequence[Check], predicted: float) -> float | None:
    """The cosine of embeddings to expect: what is missing to 1 grows with the prediction as the checks say."""
    known = [Check(check.predicted, 1 - check.agreement) for check in checks if check.agreement is not None]
    missing = expected(known, predicted)
    return None if missing is None else max(-1.0, 1 - missing)


def _cut(units: Sequence[float], width: int) -> float:
    return sum(sorted(units)[: len(units) - width])
