"""Theorem 2 of paper `allocation`: the norm of the softmax Jacobian against length, for logits of several spreads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.linalg.saturation import jacobian_norms
from headwise.papers.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, Chart, Line, Verdict
from headwise.theory.jacobian import gaussian_peak, jacobian_length_bound

LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
CLIP = 2.0
SETTLED = 64  # where 1/L has set in


@dataclass(frozen=True, slots=True)
class Settings:
    """Normal logits of one standard deviation, clipped at 2 or not."""

    spread: float
    clipped: bool
    rows: int
    seed: int = 0

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Clipped, unit and wide logits."""
        rows = 200 if size == "quick" else 4000
        kinds = ((2.0, True), (1.0, False), (3.0, False))
        return [cls(*kind, rows, seed) for kind in kinds for seed in range(seeds or (1 if size == "quick" else 3))]


def run(settings: Settings) -> dict[str, Any]:
    """Mean norm at each length, the bound, and the l1 change of rows whose logits are moved by 0.1 at random."""
    generator = torch.Generator().manual_seed(settings.seed)
    norms, bounds, moved = [], [], []
    for length in LENGTHS:
        s_NL = settings.spread * torch.randn(settings.rows, length, generator=generator, dtype=torch.float64)
        s_NL = s_NL.clamp(-CLIP, CLIP) if settings.clipped else s_NL
        a_NL = s_NL.softmax(-1)
        norms.append(float(jacobian_norms(a_NL).mean()))
        bounds.append(
            jacobian_length_bound(length, CLIP) if settings.clipped else gaussian_peak(length, settings.spread)
        )
        noise = 0.1 * torch.randn(s_NL.shape, generator=generator, dtype=torch.float64)
        moved.append(float(((s_NL + noise).softmax(-1) - a_NL).abs().sum(-1).mean()))
    return {"norm": norms, "bound": bounds, "moved": moved}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Slopes of log norm over log length, beside the 1/L of the theorem; what reaches the output."""
    slopes = {
        name: [_slope(found["norm"], name == "clipped") for found in rows] for name, rows in _kinds(points).items()
    }
    shown = ", ".join(f"{name} {np.mean(values):.2f}" for name, values in slopes.items())
    within = all(n <= b + 1e-12 for found in _kinds(points)["clipped"] for n, b in zip(found["norm"], found["bound"]))
    right = abs(np.mean(slopes["clipped"]) + 1) < 0.05 and within  # noqa: PLR2004
    moved = {name: (rows[0]["moved"][0], rows[0]["moved"][-1]) for name, rows in _kinds(points).items()}
    constant = all(last > 0.5 * first for first, last in moved.values())
    return [
        Verdict(
            "saturation",
            CONDITIONAL if right else FAILED,
            f"slope of the norm over length: {shown}",
            "1/L needs bounded logits; clipped at 2: from 64 tokens on, within the bound at every length",
        ),
        Verdict(
            "small-change",
            FAILED if constant else CONDITIONAL,
            "l1 change of a row for logits moved by 0.1, L = 4 -> 1024: "
            + ", ".join(f"{name} {first:.3f} -> {last:.3f}" for name, (first, last) in moved.items()),
            "single weights change by O(1/L) because they are of that size; their sum, which counts, does not",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Norms over length."""
    x = tuple(map(float, LENGTHS))
    lines = [Line(name, x, tuple(np.mean([f["norm"] for f in rows], axis=0))) for name, rows in _kinds(points).items()]
    lines.append(Line("1/L", x, tuple(1 / L for L in LENGTHS)))
    return [Chart("Norm of the softmax Jacobian", "length", "mean norm", tuple(lines), True, True)]


def _kinds(points: Sequence[Point[Settings]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for settings, outcome in points:
        name = "clipped" if settings.clipped else f"std {settings.spread:g}"
        found.setdefault(name, []).append(outcome)
    return found


def _slope(norms: Sequence[float], settled: bool) -> float:
    start = LENGTHS.index(SETTLED) if settled else 0
    return float(np.polyfit(np.log(LENGTHS[start:]), np.log(norms[start:]), 1)[0])
