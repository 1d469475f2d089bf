"""What a profile says of losing heads and units, and the arithmetic that kinds of reduction share.

``values`` are a `LayerProfile`'s; units of the keys are RoPE pairs first, then free directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from headwise.records.shape import LayerShape


def group_loss(layer: LayerShape, values: Mapping[str, Any]) -> list[float]:
    """For each key/value head the predicted loss increase of removing it with its query heads.

    The larger of two second-order estimates, by heads and by value directions, as both undercount so large a cut.
    """
    shared = layer.heads // layer.kv_heads
    heads, units = values["head_damage"], values["v_unit_damage"]
    return [max(sum(heads[shared * g : shared * (g + 1)]), sum(units[g])) for g in range(layer.kv_heads)]


def cut_curve(units: Sequence[Sequence[float]]) -> list[float]:
    """Predicted loss of keeping 0, 1, ..., all units in every row, each row's least felt cut first."""
    felt = [sum(column) for column in zip(*(sorted(row) for row in units), strict=True)]
    return list(accumulate(felt, initial=0.0))[::-1]


def best_split(pairs: Sequence[float], free: Sequence[float], width: int) -> tuple[float, int] | None:
    """The least loss at ``width`` by both curves, and the RoPE pairs it keeps; None: whole pairs do not fit."""
    fitting = [count for count in range(len(pairs)) if 0 <= width - 2 * count < len(free)]
    return min(((pairs[count] + free[width - 2 * count], count) for count in fitting), default=None)


def most_felt(losses: Sequence[float], count: int) -> tuple[int, ...]:
    """Numbers of the ``count`` units felt most, in their own order."""
    return tuple(sorted(sorted(range(len(losses)), key=lambda unit: -losses[unit])[:count]))
