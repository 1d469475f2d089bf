"""CIFAR-10 of paper `heads`, at a random place of a growing canvas: 2,000 images, patches of 4 x 4, two layers.

What counts is how well models learn them by heart, so there is no dropout. Quick takes the digits of scikit-learn and
patches of 2 x 2 instead. As in the paper every head has a fixed width, so models grow with their heads; the control
shares one width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headwise.papers.kit.cifar import cifar10
from headwise.papers.kit.data import Labelled, batches, digits, patches
from headwise.papers.kit.noise import margin
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Classifier, Heads, Shape, parameters
from headwise.papers.kit.training import fit, seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.intrinsic_dimension import reversal_score

RECIPE = 2
PATCHES = {"digits": 2, "cifar10": 4}
TRAIN = 2000
HEAD_DIM, LAYERS = 8, 2
CONTROL_WIDTH = 96
BATCH = 32
NOISE = 0.01  # of an accuracy, at least


@dataclass(frozen=True, slots=True)
class Settings:
    """Images, heads and side of the canvas; the control shares 96 dimensions among its heads."""

    data: str
    heads: int
    side: int
    control: bool
    seed: int = 0
    steps: int = 400

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """CIFAR-10 on canvases of 32, 40, 48 (64 to 144 tokens); quick: digits, two canvases, two head counts."""
        if size == "quick":
            cells = [("digits", h, side, False) for h in (1, 8) for side in (8, 12)]
            return [cls(*cell, seed, 200) for cell in cells for seed in range(seeds or 1)]
        cells = [
            ("cifar10", h, side, control)
            for side in (48, 40, 32)
            for control in (False, True)
            for h in (12, 8, 4, 2, 1)
        ]
        return [cls(*cell, seed=seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Accuracy on training and held-out images."""
    patch = PATCHES[settings.data]
    data = on_canvas(cifar10(TRAIN) if settings.data == "cifar10" else digits(), settings.side, patch, settings.seed)
    width = CONTROL_WIDTH if settings.control else HEAD_DIM * settings.heads
    _, tokens, numbers = data.inputs.shape
    shape = Shape(width, (Heads.square(settings.heads, width),) * LAYERS, 2 * width, tokens, False)
    model = seeded(settings.seed, lambda: Classifier(shape, nn.Linear(numbers, width), 10))
    fit(model, batches(data, BATCH), F.cross_entropy, steps=settings.steps, rate=2e-3, seed=settings.seed, decay=0.01)
    with torch.no_grad():
        answers = torch.cat([model(part).argmax(1) for part in data.inputs.split(BATCH)])
    right = (answers == data.labels).float()
    return {
        "train": float(right[: data.train].mean()),
        "held_out": float(right[data.train :].mean()),
        "parameters": parameters(model),
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """More heads raise training accuracy; where larger canvases no longer lower it; the control; held-out images."""
    plain, noise = _mean(points, "train", False), margin(_cells(points, "train", False).values(), NOISE)
    heads = sorted({h for h, _ in plain})
    sides = sorted({side for _, side in plain})
    rises = [plain[heads[-1], side] - plain[heads[0], side] for side in sides]
    scores = [float(reversal_score([1 - plain[h, side] for side in sides])) for h in heads]
    first = next((h for h in heads if _reversed([1 - plain[h, side] for side in sides], noise)), None)
    status = HELD if min(rises) > noise else CONDITIONAL if max(rises) > noise else FAILED
    shown = ", ".join(f"canvas {side}: {plain[heads[0], side]:.2f} -> {plain[heads[-1], side]:.2f}" for side in sides)
    scored = "/".join(f"{score:.2g}" for score in scores)
    verdicts = [
        Verdict(
            "images",
            status,
            f"training accuracy, {heads[0]} -> {heads[-1]} heads: {shown}",
            f"up to {noise:.3f} counts as equal",
        ),
        Verdict(
            "images-reversal",
            CONDITIONAL if first not in {None, heads[0]} else FAILED,
            f"reversal score {scored} for {'/'.join(map(str, heads))} heads, first positive beyond noise at {first}",
            "fewer images and layers: where it turns cannot be compared",
        ),
    ]
    control = _mean(points, "train", True)
    if control:
        held = {c: _mean(points, "held_out", c) for c in (False, True)}
        gains = [control[heads[-1], side] - control[heads[0], side] for side in sides]
        verdicts.append(
            Verdict(
                "images-width",
                confounded(gains, rises),
                f"gain of training accuracy from heads: {np.mean(rises):.3f} as in the paper, {np.mean(gains):.3f} at "
                "one width",
            )
        )
        noise = margin(_cells(points, "held_out", False).values(), NOISE)
        drops = [held[False][heads[-2], side] - held[False][heads[-1], side] for side in sides]
        verdicts.append(
            Verdict(
                "images-held-out",
                HELD if min(drops) > noise else CONDITIONAL if max(drops) > noise else FAILED,
                "held-out accuracy: "
                + ", ".join(
                    f"canvas {side}: {'/'.join(f'{held[False][h, side]:.2f}' for h in heads)}, at one width "
                    f"{'/'.join(f'{held[True][h, side]:.2f}' for h in heads)}"
                    for side in sides
                ),
                f"{heads[-2]} -> {heads[-1]} heads lose {min(drops):.3f} to {max(drops):.3f}, of which up to "
                f"{noise:.3f} counts as nothing",
            )
        )
    return verdicts


def _reversed(errors: Sequence[float], noise: float) -> bool:
    """Whether some longer text has a clearly lower error than a shorter one."""
    return any(shorter - longer > noise for i, shorter in enumerate(errors) for longer in errors[i + 1 :])


def confounded(gains: Sequence[float], rises: Sequence[float]) -> str:
    """Whether most of what heads gain is gone at one width."""
    gain, rise = np.mean(gains), np.mean(rises)
    return FAILED if gain >= rise or rise < NOISE else HELD if gain < rise / 2 else CONDITIONAL


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Accuracy over heads."""
    charts = []
    for control, name in ((False, f"{HEAD_DIM} dimensions per head"), (True, f"{CONTROL_WIDTH} dimensions in all")):
        lines = []
        for kind in ("train", "held_out"):
            accuracy = _mean(points, kind, control)
            for side in sorted({side for _, side in accuracy}):
                heads = sorted(h for h, s in accuracy if s == side)
                label = f"{kind.replace('_', ' ')}, canvas {side}"
                lines.append(Line(label, tuple(map(float, heads)), tuple(accuracy[h, side] for h in heads)))
        if lines:
            charts.append(Chart(f"Images on a canvas, {name}", "heads", "accuracy", tuple(lines), True))
    return charts


def on_canvas(data: Labelled, side: int, patch: int, seed: int) -> Labelled:
    """Images at random places of a ``side`` x ``side`` canvas, filled with the mean of their border, in patches."""
    images, size = data.inputs, data.inputs.shape[1]
    generator = torch.Generator().manual_seed(seed)
    border = torch.cat([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], dim=1).mean(1)
    canvas = border[:, None, None].repeat(1, side, side, *[1] * (images.ndim - 3))
    starts = torch.randint(side - size + 1, (len(images), 2), generator=generator)
    for image, place, (top, left) in zip(images, canvas, starts.tolist()):
        place[top : top + size, left : left + size] = image
    return Labelled(patches(canvas, patch), data.labels, data.train)


def _mean(points: Sequence[Point[Settings]], kind: str, control: bool) -> dict[tuple[int, int], float]:
    return {key: float(np.mean(values)) for key, values in _cells(points, kind, control).items()}


def _cells(points: Sequence[Point[Settings]], kind: str, control: bool) -> dict[tuple[int, int], list[float]]:
    """Accuracies of all seeds by heads and canvas."""
    cells: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        if settings.control == control:
            cells.setdefault((settings.heads, settings.side), []).append(outcome[kind])
    return cells
