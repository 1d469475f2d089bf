"""Figure 1 and Problem (5) of paper `allocation`, exactly, and what its term for positions overlooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.tradeoff import allocate, exponential_selection_error, head_count_curve, lag_error

WIDTH, TOKEN_DIM = 128, 16
PUBLISHED = {1: 1.326, 2: 0.663, 4: 0.332, 8: 0.166, 9: 0.481, 10: 0.580, 20: 0.841, 80: 0.965}
ROUNDING = 6e-4
BUDGETS = (
    (256, 8, (1.0, 1.0, 1.0, 1.0)),
    (256, 4, (1.0, 1.0, 1.0, 1.0)),
    (256, 16, (1.0, 1.0, 1.0, 1.0)),
    (256, 32, (1.0, 1.0, 1.0, 1.0)),
    (256, 64, (1.0, 1.0, 1.0, 1.0)),
    (256, 8, (1.0, 0.5, 0.25, 0.125)),
)
RATES = np.linspace(0.0, 0.99, 100)


@dataclass(frozen=True, slots=True)
class Settings:
    """Heads of the curve go up to ``most``."""

    most: int = 80

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """One point: it is exact and instant."""
        return [cls()]


def run(settings: Settings) -> dict[str, Any]:
    """The curve, the best allocations and the least errors of sums of exponentials."""
    heads = np.arange(1, settings.most + 1)
    allocations = [allocate(*budget) for budget in BUDGETS]
    return {
        "curve": head_count_curve(WIDTH, TOKEN_DIM, heads).tolist(),
        "groups": [[list(group) for group in each.groups] for each in allocations],
        "errors": [each.error for each in allocations],
        "selection": [_best_selection(lag, lag) for lag in (1, 2, 3, 4)],
        "rule": [float(lag_error(lag, 1, 1, lag)) for lag in (1, 2, 3, 4)],
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Our curve against the numbers read off the figure; the optimum for the 4-gram task; the positions' term."""
    outcome = points[0].outcome
    curve = outcome["curve"]
    off = max(abs(curve[heads - 1] - value) for heads, value in PUBLISHED.items())
    lowest = int(np.argmin(curve)) + 1
    four = outcome["groups"][0]
    worst = max(measured - rule for measured, rule in zip(outcome["selection"], outcome["rule"]))
    return [
        Verdict(
            "bound-curve",
            HELD if off < ROUNDING and lowest == WIDTH // TOKEN_DIM else FAILED,
            f"minimum {min(curve):.3f} at {lowest} heads; largest difference to the figure {off:.4f}",
            "token dimension 16, identified from the curve",
        ),
        Verdict(
            "allocation-rule",
            HELD if four == [[8, 8]] * 4 else FAILED,
            f"D=256, d=8, four equal lags: {', '.join(f'{h} x {w}' for h, w in four)}, "
            f"error {outcome['errors'][0]:.3f}",
            "exact solver; too little width drops lags before it narrows heads",
        ),
        Verdict(
            "selection-term",
            CONDITIONAL if worst > 0 else HELD,
            f"sums of as many exponentials as the lag leave {', '.join(f'{e:.3f}' for e in outcome['selection'])} for "
            f"lags 1 to 4; the rule says {', '.join(f'{e:.3f}' for e in outcome['rule'])}",
            "if positions are weighed by exponentials, as we read it (the paper does not say): not with as many heads "
            "as the lag; one more leaves nothing. A modelling rule, not a certificate",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Figure 1."""
    curve = points[0].outcome["curve"]
    ours = Line("bound", tuple(map(float, range(1, len(curve) + 1))), tuple(curve))
    theirs = Line("bound, paper", tuple(map(float, PUBLISHED)), tuple(PUBLISHED.values()), True)
    return [Chart("Figure 1: width 128, tokens of 16", "heads", "error bound", (ours, theirs), True)]


def _best_selection(lag: int, heads: int) -> float:
    """Least error of ``heads`` exponentials of one rate (their limit: powers times it) that pick out ``lag``."""
    return min(exponential_selection_error(lag, [rate] * heads) for rate in RATES)
