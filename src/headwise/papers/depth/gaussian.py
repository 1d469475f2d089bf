"""Theorem 3.2 of paper `depth`: the condition number of Gaussian head outputs side by side, against the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.conditioning import gaussian_condition, worst_head_count

FAR = 2.0  # widths this many times more or less than the tokens: away from the pole
EXACT = 0.1
LONG = 2048


@dataclass(frozen=True, slots=True)
class Settings:
    """Tokens, heads, and the width of one head."""

    tokens: int
    heads: int
    head_dim: int
    seed: int = 0

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """197 tokens with heads of 64, with 768 dimensions in all, and a long text; quick: without the long text."""
        fixed_dim = [(197, heads, 64) for heads in (1, 2, 3, 4, 8, 16, 24, 32, 64)]  # 12 of 64 are 768
        fixed_width = [(197, heads, 768 // heads) for heads in (1, 4, 12, 48)]
        long = [] if size == "quick" else [(LONG, heads, 32) for heads in (1, 2, 4, 8, 16, 32, 64, 96)]
        count = seeds or (1 if size == "quick" else 3)
        return [cls(*cell, seed) for cell in (*fixed_dim, *fixed_width, *long) for seed in range(count)]


def run(settings: Settings) -> dict[str, Any]:
    """Measured and predicted condition number."""
    generator = torch.Generator().manual_seed(settings.seed)
    size = (settings.tokens, settings.head_dim)
    heads = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(settings.heads)]
    s = torch.linalg.svdvals(torch.cat(heads, dim=1))
    return {
        "condition": float(s[0] / s[-1]),
        "predicted": gaussian_condition(settings.tokens, settings.heads * settings.head_dim),
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """The formula away from its pole; heads of one width on both sides of it; one total width."""
    far = [p for p in points if not 1 / FAR < p.settings.heads * p.settings.head_dim / p.settings.tokens < FAR]
    off = max(abs(outcome["condition"] / outcome["predicted"] - 1) for _, outcome in far)
    by_dim = _curve(points, lambda s: s.head_dim == 64 and s.tokens != LONG)  # noqa: PLR2004
    by_width = _curve(points, lambda s: s.heads * s.head_dim == 768 and s.tokens != LONG)  # noqa: PLR2004
    long = _curve(points, lambda s: s.tokens == LONG)
    pole = worst_head_count(points[0].settings.tokens, 64)
    grows = by_dim[1] < by_dim[2] < by_dim[3]
    last, before = (by_dim[heads] for heads in sorted(by_dim, reverse=True)[:2])
    gain = 1 - by_width[max(by_width)] / by_width[min(by_width)]
    return [
        Verdict(
            "theorem",
            HELD if off < EXACT else FAILED,
            f"within {off:.1%} of the formula away from the pole; heads of 64, 197 tokens: {_show(by_dim)}",
        ),
        Verdict(
            "more-heads",
            FAILED if last >= before else CONDITIONAL if grows else HELD,
            f"heads of 64, pole at {pole:.1f} heads: {_show(by_dim)}"
            + (f"; heads of 32, {LONG} tokens: {_show(long)}" if long else ""),
            "only where heads together are wider than the text is long",
        ),
        Verdict(
            "fixed-width",
            HELD if gain > EXACT else FAILED,
            f"768 dimensions in all: {_show(by_width)}",
            f"from {min(by_width)} to {max(by_width)} heads {-gain:+.0%}: Gaussian outputs do not know how they are "
            "cut into heads",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Condition number over heads, measured and predicted."""
    lines = []
    for name, chosen in (
        ("heads of 64, 197 tokens", lambda s: s.head_dim == 64 and s.tokens != LONG),  # noqa: PLR2004
        ("768 in all, 197 tokens", lambda s: s.heads * s.head_dim == 768 and s.tokens != LONG),  # noqa: PLR2004
        (f"heads of 32, {LONG} tokens", lambda s: s.tokens == LONG),
    ):
        for key, paper in (("condition", False), ("predicted", True)):
            curve = _curve(points, chosen, key)
            if curve:
                label = f"{name}, paper" if paper else name
                lines.append(Line(label, tuple(map(float, curve)), tuple(curve.values()), paper))
    return [Chart("Gaussian heads (dashed: formula)", "heads", "condition number", tuple(lines), True, True)]


def _curve(points: Sequence[Point[Settings]], chosen: Any, key: str = "condition") -> dict[int, float]:
    by_heads: dict[int, list[float]] = {}
    for settings, outcome in points:
        if chosen(settings):
            by_heads.setdefault(settings.heads, []).append(outcome[key])
    return {heads: float(np.median(values)) for heads, values in sorted(by_heads.items())}


def _show(curve: dict[int, float]) -> str:
    return ", ".join(f"{heads}: {value:.3g}" for heads, value in curve.items())
