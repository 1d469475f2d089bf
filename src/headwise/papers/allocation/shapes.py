"""Figure 5 of paper `allocation`: small language models with narrower or with fewer heads, at equal parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.kit.language import Reading, language_model, validation_loss
from headwise.papers.kit.noise import paired_margin
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Heads, Shape, parameters
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

RECIPE = 2
WIDTH, HEADS = 96, 8
BATCH, RATE = 4, 5e-3
EVALUATION = 128  # windows
NOISE = 0.005  # nats, at least
WAYS = ("whole", "narrow heads", "few heads", "narrow later", "few later")


@dataclass(frozen=True, slots=True)
class Settings:
    """A way to save ``1 - 1/saved`` of the attention's parameters."""

    way: str
    saved: int
    qk_norm: bool
    seed: int
    layers: int = 6
    length: int = 128
    steps: int = 600

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Half and a quarter of the attention, every way, with and without a q/k norm; quick: a quarter, briefly."""
        if size == "quick":
            ways = ("whole", "narrow heads", "few heads")
            return [cls(way, 4, False, seed, 3, 64, 80) for way in ways for seed in range(seeds or 1)]
        left_out = {("whole", 2), ("few later", 4)}  # the same as with 4; not to be had at equal parameters
        cells = [(way, saved, False) for saved in (2, 4) for way in WAYS if (way, saved) not in left_out]
        cells += [(way, 4, True) for way in ("whole", "narrow heads", "few heads")]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 3)]


def run(settings: Settings) -> dict[str, Any]:
    """Validation loss after training from scratch."""
    layers = _layers(settings)
    shape = Shape(WIDTH, layers, 4 * WIDTH, settings.length, True, "relative", qk_norm=settings.qk_norm)
    model = language_model(shape, Reading(settings.length, BATCH, settings.steps, RATE), settings.seed)
    return {"loss": validation_loss(model, settings.length, EVALUATION), "parameters": parameters(model)}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Narrow heads against few heads, then layer-dependent against uniform."""
    verdicts = [_compare("dim-or-count", points, "narrow heads", "few heads")]
    if any(settings.way == "narrow later" for settings, _ in points):
        verdicts.append(_compare("later-or-uniform", points, "narrow later", "narrow heads"))
    return verdicts


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Loss over the share of the attention that is left."""
    loss = _mean(points, "loss")
    lines = []
    for way in WAYS[1:]:
        curve = sorted((1 / saved, value) for (name, saved, norm), value in loss.items() if name == way and not norm)
        if curve:
            whole = loss["whole", 4, False]
            lines.append(Line(way, (*(x for x, _ in curve), 1.0), (*(y for _, y in curve), whole)))
    return [Chart("Trained from scratch", "share of attention parameters", "nats per character", tuple(lines))]


def _layers(settings: Settings) -> tuple[Heads, ...]:
    """Attention of each layer: the same total of parameters for all ways of one saving."""
    dim, count = WIDTH // HEADS, settings.layers
    if settings.way == "whole":
        return (Heads(HEADS, dim, dim),) * count
    if settings.way == "narrow heads":
        return (Heads(HEADS, dim // settings.saved, dim // settings.saved),) * count
    if settings.way == "few heads":
        return (Heads(HEADS // settings.saved, dim, dim),) * count
    first = count // 3 if settings.saved == 2 else max(1, count // 6)  # noqa: PLR2004
    budget = count * HEADS // settings.saved  # in heads of full width
    left = budget - first * HEADS
    later = _spread(left * dim // HEADS if settings.way == "narrow later" else left, count - first)
    narrowed = [Heads(HEADS, n, n) if settings.way == "narrow later" else Heads(n, dim, dim) for n in later]
    return (*(Heads(HEADS, dim, dim),) * first, *narrowed)


def _spread(total: int, parts: int) -> list[int]:
    """``total`` in nearly equal parts, at least 1, larger ones first."""
    return [max(1, (total + parts - 1 - index) // parts) for index in range(parts)]


def _compare(claim: str, points: Sequence[Point[Settings]], first: str, second: str) -> Verdict:
    """Differences are taken seed by seed: both ways read the same batches."""
    losses = _cells(points, "loss")
    pairs = {cell: (first, *cell[1:]) for cell in losses if cell[0] == second and (first, *cell[1:]) in losses}
    gains = {cell[1:]: np.subtract(losses[cell], losses[other]) for cell, other in pairs.items()}
    noise = paired_margin(gains.values(), NOISE)
    wins = sum(gain.mean() > noise for gain in gains.values())
    behind = sum(gain.mean() < -noise for gain in gains.values())
    status = HELD if wins == len(gains) else CONDITIONAL if wins else FAILED
    loss, size = _mean(points, "loss"), _mean(points, "parameters")
    shown = ", ".join(
        f"1/{saved} left{', q/k norm' * norm}: {loss[first, saved, norm]:.3f} against {loss[second, saved, norm]:.3f}"
        for saved, norm in gains
    )
    whole = ", ".join(f"{value:.3f}{', q/k norm' * norm}" for (way, _, norm), value in loss.items() if way == "whole")
    sizes = ", ".join(
        f"{size[first, saved, norm] / 1000:.0f}k against {size[second, saved, norm] / 1000:.0f}k"
        for saved, norm in gains
    )
    return Verdict(
        claim,
        status,
        f"{first} against {second}, nats: {shown}; whole {whole}",
        f"better in {wins} of {len(gains)}, worse in {behind}; up to {noise:.3f} counts as equal; parameters {sizes}: "
        "equal but for what learned distances of each head take",
    )


def _mean(points: Sequence[Point[Settings]], name: str) -> dict[tuple[str, int, bool], float]:
    return {key: float(np.mean(values)) for key, values in _cells(points, name).items()}


def _cells(points: Sequence[Point[Settings]], name: str) -> dict[tuple[str, int, bool], list[float]]:
    """The values of all seeds, by way, saving and norm."""
    cells: dict[tuple[str, int, bool], list[float]] = {}
    for settings, outcome in points:
        cells.setdefault((settings.way, settings.saved, settings.qk_norm), []).append(outcome[name])
    return cells
