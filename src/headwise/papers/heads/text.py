"""A stand-in for the text retrieval of paper `heads`: which of T passages continues the one that asks?

Passages are headwise's own texts and Python's manual; as in the paper a frozen embedding is projected to 32 dimensions
per head and a two-layer encoder reads query and candidates together. The control keeps the total width instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.papers.heads.images import confounded
from headwise.papers.kit.data import passages
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads, Shape, Small, parameters
from headwise.papers.kit.training import fit, seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.intrinsic_dimension import fit_scaling_law

WORDS, WIDTH = 12, 96
LAYERS, HEAD_DIM = 2, 32
HELD_OUT = 1000
BATCH = 32
SOFTENINGS = tuple(np.arange(-1.0, 1.01, 0.05).round(2))
FITS, NOISE = 0.9, 0.01
CONTROL_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """Heads and candidates; the control shares 128 dimensions among its heads."""

    heads: int
    candidates: int
    control: bool
    seed: int = 0
    queries: int = 2000
    steps: int = 1000

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Heads 1 to 8 with 8 to 32 candidates; quick: two head counts and lengths, fewer queries."""
        if size == "quick":
            return [cls(h, T, False, seed, 400, 150) for h in (1, 4) for T in (8, 16) for seed in range(seeds or 1)]
        cells = [(h, T, control) for T in (32, 16, 8) for control in (False, True) for h in (1, 2, 4, 8)]
        return [cls(*cell, seed=seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Top-1 accuracy on training and held-out queries."""
    vectors_ND, T = passages(WORDS, WIDTH), settings.candidates
    width = CONTROL_WIDTH if settings.control else HEAD_DIM * settings.heads
    shape = Shape(width, (Heads.square(settings.heads, width),) * LAYERS, 2 * width, T + 1, False, "none")
    model = seeded(settings.seed, lambda: Small(shape, Passages(width), 1))
    asks = torch.randperm(len(vectors_ND) - 1, generator=torch.Generator().manual_seed(1))
    train, held = asks[: settings.queries], asks[-HELD_OUT:]

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = train[torch.randint(len(train), (BATCH,), generator=generator)]
        return _packed(vectors_ND, chosen, T)

    def loss(answers_BT1: Tensor, places_B: Tensor) -> Tensor:
        return F.cross_entropy(answers_BT1[:, 1:, 0], places_B)

    fit(model, batch, loss, steps=settings.steps, rate=1e-3, seed=settings.seed)
    scores = {
        name: _accuracy(model, vectors_ND, ids[:HELD_OUT], T) for name, ids in (("train", train), ("held_out", held))
    }
    return {**scores, "parameters": parameters(model)}


class Passages(nn.Module):
    """Embeddings projected to the model's width; the first, which asks, is marked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project, self.asks = nn.Linear(WIDTH, width), nn.Parameter(torch.randn(width))

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Vectors of the model's width."""
        x_BTD = self.project(x_BTW)
        return torch.cat([x_BTD[:, :1] + self.asks, x_BTD[:, 1:]], dim=1)


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """More heads raise training accuracy, more candidates lower it, held-out accuracy hardly moves; the control."""
    plain = _mean(points, "train", False)
    heads = sorted({h for h, _ in plain})
    lengths = sorted({T for _, T in plain})
    rises = [plain[heads[-1], T] - plain[heads[0], T] for T in lengths]
    falls = [plain[h, lengths[-1]] <= plain[h, lengths[0]] for h in heads]
    status = HELD if min(rises) > 0 and all(falls) else CONDITIONAL if max(rises) > 0 else FAILED
    shown = ", ".join(f"T={T}: {plain[heads[0], T]:.2f} -> {plain[heads[-1], T]:.2f}" for T in lengths)
    verdicts = [Verdict("text", status, f"training accuracy, {heads[0]} -> {heads[-1]} heads: {shown}")]
    control = _mean(points, "train", True)
    if not control:
        return verdicts
    held = _mean(points, "held_out", False)
    gains = [control[heads[-1], T] - control[heads[0], T] for T in lengths]
    unseen = [held[heads[-1], T] - held[heads[0], T] for T in lengths]
    errors = [max(1 - plain[h, T], 1e-3) for h in heads for T in lengths]
    counts, tokens = [h for h in heads for _ in lengths], lengths * len(heads)
    law = fit_scaling_law(counts, tokens, errors, SOFTENINGS)
    left = np.log(errors) - np.log(law(counts, tokens))
    explained = 1 - float(np.var(left) / np.var(np.log(errors)))
    return [
        *verdicts,
        Verdict(
            "text-width",
            confounded(gains, rises),
            f"training accuracy gained: {np.mean(rises):.2f} as in the paper, {np.mean(gains):.2f} at one width",
        ),
        Verdict(
            "text-held-out",
            HELD if max(unseen) <= NOISE else CONDITIONAL if min(unseen) <= NOISE else FAILED,
            "held-out accuracy: "
            + ", ".join(f"T={T}: {'/'.join(f'{held[h, T]:.2f}' for h in heads)}" for T in lengths),
            f"{heads[0]} -> {heads[-1]} heads: {min(unseen):+.3f} to {max(unseen):+.3f}; chance is 1 / T",
        ),
        Verdict(
            "text-law",
            FAILED if law.head_rate >= 0 else HELD if law.softening > 0 and explained > FITS else CONDITIONAL,
            f"fit: rate {law.head_rate:.2f}, softening {law.softening:.2f}, power of T {law.length_power:.2f}; "
            f"explains {explained:.0%} of the variance of the logarithm",
            "other data: only signs can be compared",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Training and held-out accuracy over heads."""
    charts = []
    for control, name in ((False, "32 dimensions per head"), (True, f"{CONTROL_WIDTH} dimensions in all")):
        lines = []
        for kind in ("train", "held_out"):
            accuracy = _mean(points, kind, control)
            for T in sorted({T for _, T in accuracy}):
                heads = sorted(h for h, tokens in accuracy if tokens == T)
                label = f"{kind.replace('_', ' ')}, T={T}"
                lines.append(Line(label, tuple(map(float, heads)), tuple(accuracy[h, T] for h in heads)))
        if lines:
            charts.append(Chart(f"Text retrieval, {name}", "heads", "top-1 accuracy", tuple(lines), True))
    return charts


def _packed(vectors_ND: Tensor, asks_B: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """The passage that asks, then its continuation hidden among others; where the continuation is.

    A query always has the same other candidates.
    """
    others, places = _hidden(len(vectors_ND), candidates)
    chosen, places_B = others[asks_B].clone(), places[asks_B]
    chosen[torch.arange(len(asks_B)), places_B] = asks_B + 1
    return vectors_ND[torch.cat([asks_B[:, None], chosen], dim=1)], places_B


@cache
def _hidden(count: int, candidates: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    others = torch.randint(count, (count, candidates), generator=generator)
    return others, torch.randint(candidates, (count,), generator=generator)


@torch.no_grad()
def _accuracy(model: nn.Module, vectors_ND: Tensor, asks: Tensor, candidates: int) -> float:
    right = 0
    for part in asks.split(100):
        inputs, places = _packed(vectors_ND, part, candidates)
        right += int((model(inputs)[:, 1:, 0].argmax(1) == places).sum())
    return right / len(asks)


def _mean(points: Sequence[Point[Settings]], kind: str, control: bool) -> dict[tuple[int, int], float]:
    cells: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        if settings.control == control:
            cells.setdefault((settings.heads, settings.candidates), []).append(outcome[kind])
    return {key: float(np.mean(values)) for key, values in cells.items()}
