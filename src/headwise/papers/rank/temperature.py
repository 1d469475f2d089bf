"""The numerical rank of softmax attention with random weights over temperature, tolerance and head width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.linalg.ranks import hard_rank
from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.hard_rank import LIMIT, softmax_rank_tolerance

TEMPERATURES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)
RELATIVE, ABSOLUTE = (1e-5, 1e-3, 1e-2), (0.1, 0.5)
NAMES = (*(f"relative {t:g}" for t in RELATIVE), *(f"absolute {t:g}" for t in ABSOLUTE))
NEAR = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """Tokens, head width, repetitions."""

    tokens: int
    head_dim: int
    repeats: int
    seed: int = 0

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """n = 100, widths 1 to 128; quick: 1, 8 and 64, fewer repetitions."""
        widths, repeats = ((1, 8, 64), 4) if size == "quick" else ((1, 2, 4, 8, 16, 32, 64, 128), 40)
        return [cls(100, width, repeats, seed) for width in widths for seed in range(seeds or 1)]


def run(settings: Settings) -> dict[str, Any]:
    """Rank over n by temperature and tolerance; how often Lemma 1's tolerance is kept."""
    generator = torch.Generator().manual_seed(settings.seed)
    n, width = settings.tokens, settings.head_dim
    q, k = (torch.randn(settings.repeats, n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    scores = q @ k.mT / width**0.5
    top = scores.topk(2, dim=-1).values
    gaps = (top[..., 0] - top[..., 1]).numpy()
    hard = hard_rank(scores.argmax(-1), n)
    ranks, promised, kept = [], 0, 0
    for temperature in TEMPERATURES:
        s = torch.linalg.svdvals((scores / temperature).softmax(-1))
        counts = [(s > t * s[:, :1]).sum(-1) for t in RELATIVE] + [(s > t).sum(-1) for t in ABSOLUTE]
        ranks.append([float(count.double().mean() / n) for count in counts])
        for row, rank, values in zip(gaps, hard, s, strict=True):
            tolerance = softmax_rank_tolerance(row, n, temperature)
            if tolerance < 1:
                promised += 1
                kept += int((values > tolerance).sum() <= rank)
    return {"hard": float(hard.double().mean() / n), "ranks": ranks, "promised": promised, "kept": kept}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Where 0.63 n is visible, Lemma 1, and the rank at one dimension."""
    by_width = _by_width(points)
    wide = by_width[64]
    near = [
        (t, name)
        for t, row in zip(TEMPERATURES, wide["ranks"])
        for name, rank in zip(NAMES, row)
        if abs(rank - LIMIT) < NEAR
    ]
    one = [outcome["ranks"][0][0] for outcome in by_width.values()]
    warm, cold = wide["ranks"][0], wide["ranks"][-1]
    promised, kept = (sum(outcome[name] for outcome in by_width.values()) for name in ("promised", "kept"))
    return [
        Verdict(
            "softmax",
            HELD if len(near) == len(TEMPERATURES) * len(NAMES) else CONDITIONAL if near else FAILED,
            f"64 dimensions: T = 1 {_list(warm)}, T = 0.001 {_list(cold)} n ({'/'.join(NAMES)})",
            f"within {NEAR} of 0.63 n in {len(near)} of {len(TEMPERATURES) * len(NAMES)} temperatures and tolerances",
        ),
        Verdict(
            "lemma",
            HELD if promised and kept == promised else FAILED,
            f"singular values above its tolerance are at most the hard rank in {kept} of {promised} maps",
            "says something at low temperatures only",
        ),
        Verdict(
            "one-dimension",
            HELD if one[0] > min(one) + NEAR and one[-1] > min(one) + NEAR else FAILED,
            f"T = 1, relative 1e-5, widths {'/'.join(map(str, by_width))}: " + "/".join(f"{rank:.2f}" for rank in one),
            "full at one dimension in exact arithmetic, where no tolerance is asked for; this is float64 with one",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Rank over temperature for 64 dimensions."""
    wide = _by_width(points)[64]
    columns = np.array(wide["ranks"]).T
    lines = [Line(name, TEMPERATURES, tuple(column)) for name, column in zip(NAMES, columns.tolist())]
    lines.append(Line("1 - 1/e", (TEMPERATURES[-1], TEMPERATURES[0]), (LIMIT, LIMIT), True))
    return [Chart("Numerical rank, n = 100, 64 dimensions", "temperature", "rank / n", tuple(lines), True)]


def _by_width(points: Sequence[Point[Settings]]) -> dict[int, dict[str, Any]]:
    """Means of ranks and sums of counts over seeds."""
    rows: dict[int, list[Any]] = {}
    for settings, outcome in points:
        rows.setdefault(settings.head_dim, []).append(outcome)
    return {
        width: {
            "ranks": np.mean([outcome["ranks"] for outcome in some], axis=0).tolist(),
            **{name: sum(outcome[name] for outcome in some) for name in ("promised", "kept")},
        }
        for width, some in rows.items()
    }


def _list(ranks: Sequence[float]) -> str:
    return "/".join(f"{rank:.2f}" for rank in ranks)
