"""Figure 1b of paper `heads`: how the error falls with the neurons of the encoder and the read-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.heads.lookups import LookUpModels, Shape, Task, train
from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict

LOOK_UPS, HEAD_DIM = 4, 8
STRAIGHT = 0.8
STEEP = -0.1
FEWEST = 3  # points of a fit


@dataclass(frozen=True, slots=True)
class Settings:
    """Heads, tokens and hidden neurons N; all seeds are trained as one program."""

    heads: int
    tokens: int
    hidden: int
    seeds: int = 4
    steps: int = 3000
    rate: float = 0.01

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Full: 1 to 4 heads, N = 8 to 128. Quick: 1 and 4 heads with 8 and 32 neurons."""
        if size == "quick":
            return [cls(heads, 8, N, seeds or 2, 600) for heads in (1, 4) for N in (8, 32)]
        grid = [(heads, T, N) for T in (8, 32) for heads in (1, 2, 3, 4) for N in (8, 16, 32, 64, 128)]
        return [cls(*cell, seeds=seeds or 4) for cell in grid]


def run(settings: Settings) -> dict[str, Any]:
    """Validation NMSE of each seed."""
    models = LookUpModels(Shape(settings.heads, HEAD_DIM, settings.hidden), settings.seeds)
    return {"nmse": train(models, Task.draw(LOOK_UPS, settings.tokens), settings.steps, settings.rate)}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether the logarithm of the error falls like a straight line in log N below D heads."""
    curves = _curves(points)
    fits = {key: _line(curve) for key, curve in curves.items()}
    below = [fit for (heads, _), fit in fits.items() if heads < LOOK_UPS]
    straight = sum(correlation < -STRAIGHT and slope < STEEP for slope, correlation in below)
    status = HELD if straight == len(below) else CONDITIONAL if straight else FAILED
    shown = ", ".join(f"h={heads} T={T}: slope {slope:.2f}" for (heads, T), (slope, _) in fits.items())
    if any(len(curve) < FEWEST for curve in curves.values()):
        return [Verdict(claim, OPEN, "in full only") for claim in ("width-scaling", "width-length")]
    because = f"straight (r below -{STRAIGHT}) and falling (slope below {STEEP}) in {straight} of {len(below)}"
    return [Verdict("width-scaling", status, shown, because), _by_length(curves)]


def _by_length(curves: dict[tuple[int, int], dict[int, float]]) -> Verdict:
    """Whether a longer text is worse at every N below D heads, and better at D."""
    lengths = sorted({T for _, T in curves})
    ratios = {
        heads: [curves[heads, lengths[-1]][N] / error for N, error in curves[heads, lengths[0]].items()]
        for heads in sorted({heads for heads, _ in curves})
    }
    right = [r > 1 if heads < LOOK_UPS else r < 1 for heads, row in ratios.items() for r in row]
    status = HELD if all(right) else CONDITIONAL if any(right) else FAILED
    shown = ", ".join(f"{heads} heads {min(row):.2f}x to {max(row):.2f}x" for heads, row in ratios.items())
    return Verdict(
        "width-length",
        status,
        f"error at T = {lengths[-1]} over T = {lengths[0]}, over all N: {shown}",
        f"as claimed in {sum(right)} of {len(right)}",
    )


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Best NMSE over N, for each length."""
    curves = _curves(points)
    charts = []
    for T in sorted({T for _, T in curves}):
        lines = [
            Line(f"{heads} heads", tuple(map(float, curve)), tuple(curve.values()))
            for (heads, tokens), curve in curves.items()
            if tokens == T
        ]
        charts.append(Chart(f"Width scaling, T = {T}", "hidden neurons", "NMSE, best seed", tuple(lines), True, True))
    return charts


def _curves(points: Sequence[Point[Settings]]) -> dict[tuple[int, int], dict[int, float]]:
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for settings, outcome in points:
        curves.setdefault((settings.heads, settings.tokens), {})[settings.hidden] = min(outcome["nmse"])
    return curves


def _line(curve: dict[int, float]) -> tuple[float, float]:
    """Slope and correlation of log error against log N."""
    x, y = np.log(list(curve)), np.log(list(curve.values()))
    return float(np.polyfit(x, y, 1)[0]), float(np.corrcoef(x, y)[0, 1])
