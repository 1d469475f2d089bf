"""A causal test: attention whose rank cannot exceed a limit. Does the plateau of the loss move with the limit?

Maps go through ``rank`` learned agents, ``softmax(q a^T) softmax(a k^T)``, which bounds their rank at any head width.
Digits stand for the paper's tasks. Reversing a text is the control: there every token has to look at another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.papers.kit.language import next_loss
from headwise.papers.kit.noise import margin
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads, Shape, Small
from headwise.papers.kit.training import fit, seeded
from headwise.papers.rank.classify import BATCH, HEADS, WIDTH, train_classifier
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict

V_DIM = 24
FREE = 0
LIMITS = {"digits": (1, 2, 4, 8, 16, 32, 64), "reversal": (1, 2, 4, 8, 16, 32)}  # the last ones are none
TOKENS = {task: limits[-1] for task, limits in LIMITS.items()}
CLAIMS = {"digits": "forced", "reversal": "forced-needed"}
SYMBOLS, VALIDATION = 16, 500
SLIGHT = 0.01  # nats: lower losses do not count as lower
LEAST = 0.1  # of a loss
FEWEST = 3  # limits that make a curve


@dataclass(frozen=True, slots=True)
class Settings:
    """A task, a limit on the rank (0: none) and a head width."""

    task: str
    limit: int
    head_dim: int
    seed: int = 0
    steps: int = 700

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """All limits at three widths; quick: two limits of digits, briefly."""
        if size == "quick":
            return [cls("digits", limit, 8, seed, 150) for limit in (1, 8) for seed in range(seeds or 1)]
        cells = [
            (task, limit, width) for task, limits in LIMITS.items() for limit in (FREE, *limits) for width in (2, 8, 32)
        ]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """The training loss, among others on digits."""
    sizes = Heads(HEADS, settings.head_dim, V_DIM, settings.limit)
    if settings.task == "digits":
        return train_classifier("digits", sizes, settings.seed, settings.steps)
    return {"train_loss": _reversal(sizes, settings)}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether the loss moves with the limit until all heads together have the rank of the whole text."""
    return [_judged(task, _cells(points, task)) for task in dict.fromkeys(settings.task for settings, _ in points)]


def _judged(task: str, cells: dict[tuple[int, int], list[float]]) -> Verdict:
    """Losses are compared by their logarithms, mean over head widths."""
    limits = sorted({limit for limit, _ in cells if limit != FREE})
    widths = sorted({width for _, width in cells})
    if len(limits) < FEWEST:
        return Verdict(CLAIMS[task], OPEN, "in full only")
    logs = {key: np.log(np.add(values, SLIGHT)).tolist() for key, values in cells.items()}
    noise = margin(logs.values(), LEAST, over=len(widths))
    level = {limit: float(np.mean([logs[limit, width] for width in widths])) for limit in (FREE, *limits)}
    worse = [limit for limit in limits if level[limit] > level[FREE] + noise]
    moves, last = limits[0] in worse, max(worse, default=0)
    shown = {limit: float(np.exp(value) - SLIGHT) for limit, value in level.items()}
    to_the_end = 2 * last * HEADS >= TOKENS[task]  # limits double, so no limit that binds goes unfelt
    return Verdict(
        CLAIMS[task],
        HELD if moves and to_the_end else CONDITIONAL if moves else FAILED,
        f"training loss at rank limit {'/'.join(str(HEADS * limit) for limit in limits)} of {HEADS} heads together: "
        f"{'/'.join(f'{shown[limit]:.3f}' for limit in limits)}; without a limit {shown[FREE]:.3f}",
        f"geometric mean over heads of {', '.join(map(str, widths))}; {TOKENS[task]} tokens (0.63 n would be "
        f"{0.63 * TOKENS[task]:.0f}); a limit counts if it costs more than a factor of {np.exp(noise):.2f}: "
        + (", ".join(str(HEADS * limit) for limit in worse) or "none does"),
    )


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Training loss over the limit."""
    charts = []
    for task in dict.fromkeys(settings.task for settings, _ in points):
        loss = _mean(_cells(points, task))
        limits = sorted({limit for limit, _ in loss if limit != FREE})
        x = tuple(map(float, limits))
        lines = [
            Line(f"heads of {width}", x, tuple(loss[limit, width] for limit in limits))
            for width in sorted({width for _, width in loss})
        ]
        charts.append(Chart(f"{task}, attention of limited rank", "rank limit", "training loss", tuple(lines), True))
    return charts


def _reversal(sizes: Heads, settings: Settings) -> float:
    """Loss of one layer that writes a random text backwards."""
    tokens = TOKENS["reversal"]
    shape = Shape(WIDTH, (sizes,), 2 * WIDTH, tokens, False)
    model = seeded(settings.seed, lambda: Small(shape, nn.Embedding(SYMBOLS, WIDTH), SYMBOLS))

    def batch(generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
        symbols_BT = torch.randint(SYMBOLS, (count, tokens), generator=generator)
        return symbols_BT, symbols_BT.flip(1)

    fit(model, batch, next_loss, steps=settings.steps, rate=5e-3, seed=settings.seed)
    inputs, targets = batch(torch.Generator().manual_seed(10_000 + settings.seed), VALIDATION)
    with torch.no_grad():
        return float(next_loss(model(inputs), targets))


def _mean(cells: dict[tuple[int, int], list[float]]) -> dict[tuple[int, int], float]:
    return {key: float(np.mean(values)) for key, values in cells.items()}


def _cells(points: Sequence[Point[Settings]], task: str) -> dict[tuple[int, int], list[float]]:
    """Training losses of all seeds by limit and head width."""
    losses: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        if settings.task == task:
            losses.setdefault((settings.limit, settings.head_dim), []).append(outcome["train_loss"])
    return losses
