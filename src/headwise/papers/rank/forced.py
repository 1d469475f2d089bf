"""A causal test: attention whose rank cannot exceed a limit. Does the plateau of the loss move with the limit?

Maps go through ``rank`` learned agents, ``softmax(q a^T) softmax(a k^T)``, which bounds their rank at any head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.point import Point
from headwise.papers.rank.classify import HEADS, train_classifier
from headwise.papers.small import Heads
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict

V_DIM = 24
FREE = 0
NOTABLE, SLIGHT = 0.1, 0.005  # of the loss, and in nats
FEWEST = 3  # limits that make a curve


@dataclass(frozen=True, slots=True)
class Settings:
    """A limit on the rank (0: none) and a head width."""

    limit: int
    head_dim: int
    seed: int = 0
    steps: int = 700

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Limits 1 to 64 at three widths, 64 being none for 64 tokens; quick: two limits, briefly."""
        if size == "quick":
            return [cls(limit, 8, seed, 150) for limit in (1, 8) for seed in range(seeds or 1)]
        cells = [(limit, width) for limit in (FREE, 1, 2, 4, 8, 16, 32, 64) for width in (2, 8, 32)]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Losses and accuracies on digits."""
    sizes = Heads(HEADS, settings.head_dim, V_DIM, settings.limit)
    return train_classifier("digits", sizes, settings.seed, settings.steps)


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether the plateau of the loss over head widths moves with the limit, all the way."""
    loss = _mean(points)
    limits = sorted({limit for limit, _ in loss if limit != FREE})
    widths = sorted({width for _, width in loss})
    if len(limits) < FEWEST:
        return [Verdict("forced", OPEN, "in full only")]
    plateau = [min(loss[limit, width] for width in widths) for limit in limits]
    near = (1 + NOTABLE) * min(plateau) + SLIGHT
    moves = plateau[0] > near
    enough = next(limit for limit, value in zip(limits, plateau) if value <= near)
    narrow = [loss[limit, widths[0]] / loss[limit, widths[-1]] for limit in limits]
    return [
        Verdict(
            "forced",
            HELD if moves and enough == limits[-1] else CONDITIONAL if moves else FAILED,
            f"lowest training loss over head widths at rank limit {'/'.join(map(str, limits))}: {_list(plateau)}"
            + (f"; without a limit {min(loss[FREE, w] for w in widths):.3f}" if (FREE, widths[0]) in loss else ""),
            f"from a limit of {enough} of 64 tokens on within {NOTABLE:.0%} of the best (0.63 n would be 40); heads of "
            f"{widths[0]} against {widths[-1]} at each limit: {_list(narrow)} times the loss",
        )
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Training loss over the limit."""
    loss = _mean(points)
    limits = sorted({limit for limit, _ in loss if limit != FREE})
    widths = sorted({width for _, width in loss})
    x = tuple(map(float, limits))
    lines = [Line(f"heads of {width}", x, tuple(loss[limit, width] for limit in limits)) for width in widths]
    return [Chart("Digits, attention of limited rank", "rank limit", "training loss", tuple(lines), True)]


def _mean(points: Sequence[Point[Settings]]) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        found.setdefault((settings.limit, settings.head_dim), []).append(outcome["train_loss"])
    return {key: float(np.mean(values)) for key, values in found.items()}


def _list(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
