"""Figure 2 of paper `allocation`: a 4-gram task on white noise, by head count, position encoding and norm.

The figure counts "heads" without saying of what. Per group of the theory (four lags, so four groups that share 256
dimensions) or in all: both are the same ordinary layer, read at 4H or at H heads, so one curve answers both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads, Positions, Shape, Small
from headwise.papers.kit.training import fit, seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict
from headwise.theory.tradeoff import split_heads

WIDTH, TOKEN_DIM, LAGS = 256, 8, 4
PUBLISHED = {1: 0.3197, 2: 0.3174, 4: 0.1129, 8: 0.0167, 16: 0.0234, 32: 0.0559}
ARMS: dict[str, tuple[Positions, bool, float]] = {
    "relative": ("relative", False, 0.0),
    "relative, dropout": ("relative", False, 0.1),
    "sinusoidal": ("sinusoidal", False, 0.0),
    "sinusoidal, q/k norm": ("sinusoidal", True, 0.0),
    "learned": ("learned", False, 0.0),
    "learned, q/k norm": ("learned", True, 0.0),
    "alibi": ("alibi", False, 0.0),
}
SLIGHT = 0.01  # of the variance, which is 1: errors that differ by less count as equal
SOLVED = 0.1
STRONGER = 2.0
READINGS = {"in all": (1, 32), "per group": (LAGS, 32 * LAGS)}  # of the heads that Figure 2 counts
VALIDATION = 500


@dataclass(frozen=True, slots=True)
class Settings:
    """Total heads that share 256 dimensions, and the position encoding."""

    arm: str
    heads: int
    seed: int = 0
    length: int = 16
    batch: int = 32
    steps: int = 800

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Full: every arm at 1 to 128 heads. Quick: learned relative positions at 1, 4 and 32 heads."""
        if size == "quick":
            return [cls("relative", heads, seed, 12, 16, 300) for heads in (1, 4, 32) for seed in range(seeds or 1)]
        cells = [
            (arm, heads, seed) for arm in ARMS for heads in (128, 64, 32, 16, 8, 4, 2, 1) for seed in range(seeds or 2)
        ]
        return [cls(*cell) for cell in cells]


def run(settings: Settings) -> dict[str, Any]:
    """Validation and last training MSE of ``y_t = sum_i rho_i x_{t-i}``, whose variance is 1; spread of logits."""
    positions, norm, dropout = ARMS[settings.arm]
    shape = Shape(
        WIDTH,
        (Heads.square(settings.heads, WIDTH),),
        0,
        settings.length,
        True,
        positions,
        norm=False,
        qk_norm=norm,
        dropout=dropout,
    )
    model = seeded(settings.seed, lambda: Small(shape, nn.Linear(TOKEN_DIM, WIDTH), TOKEN_DIM))
    task = seeded(settings.seed + 1, lambda: Grams(LAGS))

    def batch(generator: torch.Generator, count: int = settings.batch) -> tuple[Tensor, Tensor]:
        x_BTd = torch.randn(count, settings.length, TOKEN_DIM, generator=generator)
        return x_BTd, task(x_BTd)

    losses = fit(model, batch, _error, steps=settings.steps, rate=1e-3, seed=settings.seed)
    x_BTd, y_BTd = batch(torch.Generator().manual_seed(10_000 + settings.seed), VALIDATION)
    with torch.no_grad():
        attention, (x_in,) = model.attentions()[0], model.attention_inputs(x_BTd[:32])
        last_BHT = attention.logits(*attention.queries_and_keys(x_in))[:, :, -1]
        return {
            "validation": float(_error(model(x_BTd), y_BTd)),
            "training": float(np.mean(losses[-50:])),
            "logit_std": float(last_BHT.std(-1).mean()),
        }


class Grams(nn.Module):
    """``y_t = sum_i rho_i x_{t-i}`` for lags 1 to ``lags``, with random orthogonal rho_i of equal norm."""

    def __init__(self, lags: int) -> None:
        super().__init__()
        rho = torch.stack([torch.linalg.qr(torch.randn(TOKEN_DIM, TOKEN_DIM))[0] for _ in range(lags)])
        self.register_buffer("rho", rho / lags**0.5)

    def forward(self, x_BTd: Tensor) -> Tensor:
        """Answers for every token; those before the first count as 0."""
        y_BTd = torch.zeros_like(x_BTd)
        for lag, rho in enumerate(self.get_buffer("rho"), start=1):
            y_BTd[:, lag:] += x_BTd[:, :-lag] @ rho.T
        return y_BTd


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether the error falls steeply with heads, and whether it turns up again, in each arm and reading."""
    curves = _curves(points)
    steep, turns = {}, {}
    for arm, curve in curves.items():
        for reading, (first, last) in READINGS.items():
            part = {heads: error for heads, error in curve.items() if first <= heads <= last}
            steep[arm, reading] = part[min(part)] > 2 * min(part.values()) + SLIGHT
            turns[arm, reading] = part[max(part)] > min(part.values()) + SLIGHT
    rule = {h: split_heads(h, WIDTH // h, TOKEN_DIM, [1.0] * LAGS).error for h in next(iter(curves.values()))}
    predicted = min(rule, key=rule.__getitem__)
    best = {arm: min(curve, key=curve.__getitem__) for arm, curve in curves.items()}
    equal = {arm: as_good(curve) for arm, curve in curves.items()}
    learnt = [arm for arm, curve in curves.items() if min(curve.values()) < SOLVED]
    ruled = [ruled_by(predicted, curves[arm]) for arm in learnt]
    return [
        Verdict(
            "gram-drop",
            _status(steep.values()),
            "; ".join(
                f"{arm}: {curve[min(curve)]:.3f} at {min(curve)}, best {curve[best[arm]]:.4f} at {best[arm]}, "
                f"{curve[max(curve)]:.4f} at {max(curve)}"
                for arm, curve in curves.items()
            ),
            f"more than halved: {_count(steep)}",
        ),
        Verdict(
            "gram-upturn",
            _status(turns.values()),
            f"at most heads worse than at the best by more than {SLIGHT} of the variance: {_count(turns)}",
            "in " + (", ".join(f"{arm} ({reading})" for (arm, reading), turn in turns.items() if turn) or "none"),
        ),
        Verdict(
            "gram-prediction",
            ruled[0] if len(set(ruled)) == 1 else CONDITIONAL if ruled else FAILED,
            f"Problem (5) says {predicted} heads in all; as good as the best here: "
            + ", ".join(f"{equal[arm][0]} to {equal[arm][-1]} ({arm})" for arm in learnt),
            f"{predicted} heads are among them in {sum(predicted in equal[arm] for arm in learnt)} of {len(learnt)} "
            f"arms that learnt the task, the fewest in {ruled.count(HELD)}; read per group the paper's best, 8 heads, "
            "is these 32; read in all it contradicts its rule",
        ),
        *_norms(curves),
    ]


def as_good(curve: dict[int, float]) -> list[int]:
    """Head counts whose error is as good as the best, ascending."""
    return [heads for heads in sorted(curve) if curve[heads] <= min(curve.values()) + SLIGHT]


def ruled_by(predicted: int, curve: dict[int, float]) -> str:
    """Held if the predicted head count is the fewest that will do; not if it will not do, or if any number will."""
    equal = as_good(curve)
    if equal[0] == predicted:
        return HELD
    return CONDITIONAL if predicted in equal and equal[0] > min(curve) else FAILED


def _norms(curves: dict[str, dict[int, float]]) -> list[Verdict]:
    """The error at most heads, with and without a query-key norm."""
    pairs = [(arm, f"{arm}, q/k norm") for arm in curves if f"{arm}, q/k norm" in curves]
    if not pairs:
        return [Verdict("gram-norm", OPEN, "in full only")]
    last = {arm: curve[max(curve)] for arm, curve in curves.items()}
    turn = {arm: last[arm] > min(curve.values()) + SLIGHT for arm, curve in curves.items()}
    only = [turn[normed] and not turn[plain] for plain, normed in pairs]
    stronger = [last[normed] > STRONGER * last[plain] + SLIGHT for plain, normed in pairs]
    shown = ", ".join(f"{arm} {last[arm]:.4f}" for pair in pairs for arm in pair)
    return [
        Verdict(
            "gram-norm",
            HELD if all(only) else CONDITIONAL if any(only) or any(stronger) else FAILED,
            f"error at most heads: {shown}",
            f"turns up with the norm only in {sum(only)} of {len(pairs)} position encodings; the norm more than "
            f"doubles it in {sum(stronger)}",
        )
    ]


def _status(true: Iterable[bool]) -> str:
    checks = list(true)
    return HELD if all(checks) else CONDITIONAL if any(checks) else FAILED


def _count(true: dict[tuple[str, str], bool]) -> str:
    return ", ".join(
        f"{sum(value for (_, name), value in true.items() if name == reading)} of "
        f"{sum(name == reading for _, name in true)} arms read {reading}"
        for reading in READINGS
    )


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Validation error over all heads, the figure in both readings."""
    lines = [
        Line(arm, tuple(map(float, sorted(curve))), tuple(curve[h] for h in sorted(curve)))
        for arm, curve in _curves(points).items()
    ]
    paper = tuple(PUBLISHED.values())
    lines += [
        Line("heads in all, paper", tuple(map(float, PUBLISHED)), paper, True),
        Line("heads per group, paper", tuple(4.0 * heads for heads in PUBLISHED), paper, True),
    ]
    return [Chart("Figure 2: 4-gram task", "heads in all", "validation MSE", tuple(lines), True, True)]


def _curves(points: Sequence[Point[Settings]]) -> dict[str, dict[int, float]]:
    errors: dict[str, dict[int, list[float]]] = {}
    for settings, outcome in points:
        errors.setdefault(settings.arm, {}).setdefault(settings.heads, []).append(outcome["validation"])
    return {arm: {heads: float(np.mean(values)) for heads, values in row.items()} for arm, row in errors.items()}


def _error(answers_BTd: Tensor, targets_BTd: Tensor) -> Tensor:
    return (answers_BTd - targets_BTd)[:, LAGS:].square().mean()
