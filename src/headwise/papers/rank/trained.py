"""Rank against accuracy in trained models: pixels of digits, characters of Python's manual, by head width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads
from headwise.papers.rank.classify import HEADS, train_classifier
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.hard_rank import LIMIT

V_DIM = 24
STRONG = 0.7


@dataclass(frozen=True, slots=True)
class Settings:
    """Data and width of queries and keys; values keep theirs."""

    data: str
    head_dim: int
    seed: int = 0
    steps: int = 700

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Widths 1 to 32 on both; quick: three widths of digits, briefly."""
        if size == "quick":
            return [cls("digits", width, seed, 150) for width in (1, 4, 16) for seed in range(seeds or 1)]
        cells = [(data, width) for data in ("digits", "chapters") for width in (1, 2, 4, 8, 16, 32)]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 3)]


def run(settings: Settings) -> dict[str, Any]:
    """Accuracy, and ranks of the first layer before and after training."""
    sizes = Heads(HEADS, settings.head_dim, V_DIM)
    return train_classifier(settings.data, sizes, settings.seed, settings.steps)


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether accuracy goes with the rank, and where ranks of trained heads lie."""
    table = _table(points)
    fits, shown, ranks = [], [], []
    for data, rows in table.items():
        widths = sorted(rows)
        accuracy = [rows[w]["held_out"] for w in widths]
        ranks += [rows[w]["after"] for w in widths]
        fits.append(_correlation([rows[w]["after"] for w in widths], accuracy))
        shown.append(f"{data}: accuracy {_list(accuracy)}, rank after {_list([rows[w]['after'] for w in widths])} n")
    lower = [row["after"] < row["before"] for rows in table.values() for row in rows.values()]
    high = sum(fit > STRONG for fit in fits)
    return [
        Verdict(
            "accuracy",
            HELD if high == len(fits) else CONDITIONAL if high else FAILED,
            f"widths {'/'.join(map(str, sorted(next(iter(table.values())))))}. {'; '.join(shown)}",
            f"correlation of accuracy with the hard rank {', '.join(f'{fit:.2f}' for fit in fits)}",
        ),
        Verdict(
            "trained-rank",
            FAILED if max(ranks) < LIMIT / 2 else CONDITIONAL,
            f"hard rank after training {min(ranks):.2f} to {max(ranks):.2f} n; training lowers it in {sum(lower)} of "
            f"{len(lower)}",
            "0.63 n describes random weights and orthonormal inputs",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Accuracy and ranks over head width."""
    charts = []
    names = {"held_out": "held-out accuracy", "before": "hard rank / n before", "after": "hard rank / n after"}
    for data, rows in _table(points).items():
        x = tuple(map(float, sorted(rows)))
        lines = tuple(Line(name, x, tuple(rows[w][key] for w in sorted(rows))) for key, name in names.items())
        charts.append(Chart(f"Trained on {data}", "head width", "share", lines, True))
    return charts


def _table(points: Sequence[Point[Settings]]) -> dict[str, dict[int, dict[str, float]]]:
    rows: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for settings, outcome in points:
        cell = (outcome["held_out"], outcome["before"]["hard"], outcome["after"]["hard"])
        rows.setdefault(settings.data, {}).setdefault(settings.head_dim, []).append(cell)
    names = ("held_out", "before", "after")
    return {
        data: {w: dict(zip(names, np.mean(cells, axis=0).tolist())) for w, cells in by_width.items()}
        for data, by_width in rows.items()
    }


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if np.std(x) > 0 and np.std(y) > 0 else 0.0


def _list(values: Sequence[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
