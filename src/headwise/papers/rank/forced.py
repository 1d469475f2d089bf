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

from headwise.papers.language import next_loss
from headwise.papers.noise import margin
from headwise.papers.point import Point
from headwise.papers.rank.classify import BATCH, HEADS, WIDTH, train_classifier
from headwise.papers.small import Heads, Shape, Small
from headwise.papers.training import fit, seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict

V_DIM = 24
FREE = 0
LIMITS = {"digits": (1, 2, 4, 8, 16, 32, 64), "reversal": (1, 2, 4, 8, 16, 32)}  # the last ones are none
TOKENS = {task: limits[-1] for task, limits in LIMITS.items()}
CLAIMS = {"digits": "forced", "reversal": "forced-needed"}
SYMBOLS, VALIDATION = 16, 500
SLIGHT = 0.005  # nats, at least
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
    """Whether the plateau of the loss over head widths moves with the limit, all the way."""
    return [_judged(task, _cells(points, task)) for task in dict.fromkeys(settings.task for settings, _ in points)]


def _judged(task: str, cells: dict[tuple[int, int], list[float]]) -> Verdict:
    loss, noise = _mean(cells), margin(cells.values(), SLIGHT)
    limits = sorted({limit for limit, _ in loss if limit != FREE})
    widths = sorted({width for _, width in loss})
    if len(limits) < FEWEST:
        return Verdict(CLAIMS[task], OPEN, "in full only")
    plateau = [min(loss[limit, width] for width in widths) for limit in limits]
    near = min(plateau) + noise
    moves = plateau[0] > near
    enough = next(limit for limit, value in zip(limits, plateau) if value <= near)
    narrow = [loss[limit, widths[0]] - loss[limit, widths[-1]] for limit in limits]
    return Verdict(
        CLAIMS[task],
        HELD if moves and enough == limits[-1] else CONDITIONAL if moves else FAILED,
        f"lowest training loss over head widths at rank limit {'/'.join(map(str, limits))}: {_list(plateau)}; "
        f"without a limit {min(loss[FREE, width] for width in widths):.3f}",
        f"up to {noise:.3f} counts as equal: from a limit of {enough} of {TOKENS[task]} tokens on as good as the best "
        f"(0.63 n would be {0.63 * TOKENS[task]:.0f}); heads of {widths[0]} against {widths[-1]} at each limit: "
        f"{_list(narrow)} nats",
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
    found: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        if settings.task == task:
            found.setdefault((settings.limit, settings.head_dim), []).append(outcome["train_loss"])
    return found


def _list(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
