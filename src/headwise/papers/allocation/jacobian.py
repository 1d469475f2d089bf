"""Theorem 2 of paper `allocation`: the norm of the softmax Jacobian against length, for logits of several spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.linalg.saturation import jacobian_norms
from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.jacobian import gaussian_peak, jacobian_length_bound

LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
CLIP = 2.0
SETTLED = 64  # where 1/L has set in
MOVED = 0.1
NORMS = {"largest": torch.inf, "l2": 2, "l1": 1}
HEAD_DIM, LEFT, GROUPS, QUERIES = 64, 4, 8, 50
SPECTRA = {"flat": torch.ones(HEAD_DIM), "decaying": torch.exp(-torch.arange(HEAD_DIM) / 6)}
FALLING = -0.5  # slope over length


@dataclass(frozen=True, slots=True)
class Settings:
    """Normal logits of one standard deviation, clipped at 2 or not; or a head of a ``spectrum`` that is cut."""

    spread: float
    clipped: bool
    rows: int
    seed: int = 0
    spectrum: str = ""

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Clipped, unit and wide logits; heads of 64 cut to 4."""
        rows, count = (200, seeds or 1) if size == "quick" else (4000, seeds or 3)
        kinds = ((2.0, True, ""), (1.0, False, ""), (3.0, False, ""), *((1.0, False, name) for name in SPECTRA))
        return [cls(spread, clipped, rows, s, name) for spread, clipped, name in kinds for s in range(count)]


def run(settings: Settings) -> dict[str, Any]:
    """Mean norm at each length, the bound, and the change of rows: logits moved at random, or the head cut."""
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.spectrum:
        pairs = [_cut(SPECTRA[settings.spectrum], length, generator) for length in LENGTHS]
        return {"moved": _changes([after.softmax(-1) - before.softmax(-1) for before, after in pairs])}
    norms, bounds, changes = [], [], []
    for length in LENGTHS:
        s_NL = settings.spread * torch.randn(settings.rows, length, generator=generator, dtype=torch.float64)
        s_NL = s_NL.clamp(-CLIP, CLIP) if settings.clipped else s_NL
        a_NL = s_NL.softmax(-1)
        norms.append(float(jacobian_norms(a_NL).mean()))
        bounds.append(
            jacobian_length_bound(length, CLIP) if settings.clipped else gaussian_peak(length, settings.spread)
        )
        noise = MOVED * torch.randn(s_NL.shape, generator=generator, dtype=torch.float64)
        changes.append((s_NL + noise).softmax(-1) - a_NL)
    return {"norm": norms, "bound": bounds, "moved": _changes(changes)}


def _cut(spectrum_K: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits of unit spread of a head with this spectrum, and those of its first dimensions alone."""
    q = torch.randn(GROUPS, QUERIES, HEAD_DIM, generator=generator, dtype=torch.float64) * spectrum_K
    k = torch.randn(GROUPS, length, HEAD_DIM, generator=generator, dtype=torch.float64) / spectrum_K.norm()
    return q @ k.mT, q[..., :LEFT] @ k[..., :LEFT].mT


def _changes(rows: Sequence[Tensor]) -> dict[str, list[float]]:
    """Mean size of the change of a row at each length, in several norms."""
    return {
        name: [float(torch.linalg.vector_norm(change, norm, dim=-1).mean()) for change in rows]
        for name, norm in NORMS.items()
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Slopes of log norm over log length, beside the 1/L of the theorem; what reaches the output."""
    kinds = _kinds(points)
    drawn = {name: rows for name, rows in kinds.items() if "norm" in rows[0]}
    slopes = {name: [_slope(outcome["norm"], name == "clipped") for outcome in rows] for name, rows in drawn.items()}
    shown = ", ".join(f"{name} {np.mean(values):.2f}" for name, values in slopes.items())
    within = all(n <= b + 1e-12 for outcome in drawn["clipped"] for n, b in zip(outcome["norm"], outcome["bound"]))
    right = abs(np.mean(slopes["clipped"]) + 1) < 0.05 and within  # noqa: PLR2004
    moved = {
        norm: {name: float(np.mean([_slope(row["moved"][norm], True) for row in rows])) for name, rows in kinds.items()}
        for norm in NORMS
    }
    sums = {name: np.mean([row["moved"]["l1"][-1] for row in rows]) for name, rows in kinds.items()}
    fall = all(slope < FALLING for slope in moved["l1"].values())
    some = any(slope < FALLING for slope in moved["largest"].values())
    return [
        Verdict(
            "saturation",
            CONDITIONAL if right else FAILED,
            f"slope of the norm over length: {shown}",
            "1/L needs bounded logits; clipped at 2: from 64 tokens on, within the bound at every length",
        ),
        Verdict(
            "small-change",
            HELD if fall else CONDITIONAL if some else FAILED,
            "slope of the change of a row over length: "
            + "; ".join(f"{norm} {_list(by_kind)}" for norm, by_kind in moved.items()),
            f"in all (l1) at {LENGTHS[-1]} tokens: {_list(sums)}; logits moved by {MOVED} at random, heads of "
            f"{HEAD_DIM} cut to {LEFT}",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Norms over length."""
    x = tuple(map(float, LENGTHS))
    kinds = _kinds(points)
    drawn = {name: rows for name, rows in kinds.items() if "norm" in rows[0]}
    lines = [Line(name, x, tuple(np.mean([f["norm"] for f in rows], axis=0))) for name, rows in drawn.items()]
    lines.append(Line("1/L", x, tuple(1 / L for L in LENGTHS)))
    changes = [
        Line(f"{name}, {norm}", x, tuple(np.mean([f["moved"][norm] for f in rows], axis=0)))
        for name, rows in kinds.items()
        for norm in ("largest", "l1")
    ]
    return [
        Chart("Norm of the softmax Jacobian", "length", "mean norm", tuple(lines), True, True),
        Chart("Change of attention", "length", "change of a row", tuple(changes), True, True),
    ]


def _kinds(points: Sequence[Point[Settings]]) -> dict[str, list[Any]]:
    by_kind: dict[str, list[Any]] = {}
    for settings, outcome in points:
        drawn = "clipped" if settings.clipped else f"std {settings.spread:g}"
        name = f"{settings.spectrum} head" if settings.spectrum else drawn
        by_kind.setdefault(name, []).append(outcome)
    return by_kind


def _slope(norms: Sequence[float], settled: bool) -> float:
    start = LENGTHS.index(SETTLED) if settled else 0
    return float(np.polyfit(np.log(LENGTHS[start:]), np.log(norms[start:]), 1)[0])


def _list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())
