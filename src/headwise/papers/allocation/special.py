"""Named special cases of paper `allocation`: copying the previous token, a whole induction head, a nonlinear map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.papers.allocation.ngram import SOLVED, TOKEN_DIM, Grams, as_good, ruled_by
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads, Shape, Small
from headwise.papers.kit.training import fit, seeded
from headwise.records.papers import FAILED, Chart, Line, Verdict
from headwise.theory.tradeoff import split_heads

WIDTH, LENGTH, BATCH = 64, 24, 32
SYMBOLS, PATTERN = 32, 32
PERIODS = (8, 16)  # shortest and longest; which it is, a model can only tell by what it has seen
UNSEEN = -1  # cannot be predicted from what came before
STEEP = 2.0
TASKS = ("copy", "induction", "nonlinear")
VALIDATION = 500


@dataclass(frozen=True, slots=True)
class Settings:
    """A task and the heads that share 64 dimensions in each layer."""

    task: str
    heads: int
    seed: int = 0
    steps: int = 3000

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """1 to 32 heads; quick: 1 and 8, fewer steps."""
        heads, steps = ((1, 8), 300) if size == "quick" else ((1, 2, 4, 8, 16, 32), 3000)
        count = seeds or (1 if size == "quick" else 3)
        return [cls(task, h, seed, steps) for task in TASKS for h in heads for seed in range(count)]


def run(settings: Settings) -> dict[str, Any]:
    """Validation error: MSE of numbers of about unit size, or the share of wrong symbols where a pattern repeats."""
    if settings.task == "induction":
        return {"error": _induction(settings)}
    layers = (Heads.square(settings.heads, WIDTH),)
    nonlinear = settings.task == "nonlinear"
    shape = Shape(WIDTH, layers, 4 * WIDTH if nonlinear else 0, LENGTH, True, "relative", norm=False)
    model = seeded(settings.seed, lambda: Small(shape, nn.Linear(TOKEN_DIM, WIDTH), TOKEN_DIM))
    task = seeded(settings.seed + 1, lambda: Grams(2 if nonlinear else 1))

    def batch(generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
        x_BTd = torch.randn(count, LENGTH, TOKEN_DIM, generator=generator)
        return x_BTd, torch.tanh(STEEP * task(x_BTd)) if nonlinear else task(x_BTd)

    fit(model, batch, _error, steps=settings.steps, rate=1e-3, seed=settings.seed)
    x_BTd, y_BTd = batch(torch.Generator().manual_seed(10_000 + settings.seed), VALIDATION)
    with torch.no_grad():
        return {"error": float(_error(model(x_BTd), y_BTd))}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Where each task is solved best, beside what the rule says for its lags."""
    curves = _curves(points)
    predicted = {
        task: _argmin({h: split_heads(h, WIDTH // h, dim, lags).error for h in curves[task]})
        for task, dim, lags in (
            ("copy", TOKEN_DIM, [1.0]),
            ("induction", SYMBOLS, [1.0]),
            ("nonlinear", TOKEN_DIM, [1.0, 1.0]),
        )
    }
    verdicts = []
    for task, curve in curves.items():
        equal, solved = as_good(curve), min(curve.values()) < SOLVED
        shown = ", ".join(f"{h}: {curve[h]:.3g}" for h in sorted(curve))
        verdicts.append(
            Verdict(
                task,
                ruled_by(predicted[task], curve) if solved else FAILED,
                f"error by heads {shown}",
                f"the rule says {predicted[task]} heads; as good as the best here: {', '.join(map(str, equal))}"
                + ("" if solved else "; no head count learnt the task"),
            )
        )
    return verdicts


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Error over heads."""
    lines = [
        Line(task, tuple(map(float, sorted(curve))), tuple(max(curve[h], 1e-7) for h in sorted(curve)))
        for task, curve in _curves(points).items()
    ]
    return [Chart("Special cases", "heads that share 64 dimensions", "error", tuple(lines), True, True)]


def _induction(settings: Settings) -> float:
    """Patterns of symbols, each only once, repeated with a period that differs from text to text."""
    shape = Shape(WIDTH, (Heads.square(settings.heads, WIDTH),) * 2, 0, PATTERN, True, "relative")
    model = seeded(settings.seed, lambda: Small(shape, nn.Embedding(SYMBOLS, WIDTH), SYMBOLS))

    def batch(generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
        symbols = torch.rand(count, SYMBOLS, generator=generator).argsort(1)
        period_B1 = torch.randint(PERIODS[0], PERIODS[1] + 1, (count, 1), generator=generator)
        place_T = torch.arange(PATTERN + 1)
        whole = symbols.gather(1, place_T % period_B1)
        return whole[:, :-1], whole[:, 1:].masked_fill(place_T[:-1] < period_B1, UNSEEN)

    def loss(logits_BTS: Tensor, next_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTS.flatten(0, 1), next_BT.flatten(), ignore_index=UNSEEN)

    fit(model, batch, loss, steps=settings.steps, rate=2e-3, seed=settings.seed)
    inputs, targets = batch(torch.Generator().manual_seed(10_000 + settings.seed), VALIDATION)
    with torch.no_grad():
        wrong = model(inputs).argmax(-1) != targets
    return float(wrong[targets != UNSEEN].float().mean())


def _curves(points: Sequence[Point[Settings]]) -> dict[str, dict[int, float]]:
    errors: dict[str, dict[int, list[float]]] = {}
    for settings, outcome in points:
        errors.setdefault(settings.task, {}).setdefault(settings.heads, []).append(outcome["error"])
    return {task: {heads: float(np.mean(values)) for heads, values in row.items()} for task, row in errors.items()}


def _argmin(curve: dict[int, float]) -> int:
    return min(curve, key=curve.__getitem__)


def _error(answers_BTd: Tensor, targets_BTd: Tensor) -> Tensor:
    return (answers_BTd - targets_BTd)[:, 2:].square().mean()
