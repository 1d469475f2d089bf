"""A stand-in for CIFAR-10 of paper `heads`: digits at a random place of a growing canvas, patches of 2 x 2.

As in the paper every head has a fixed width, so models grow with their heads; the control shares one width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headwise.papers.data import DIGIT_SIDE, Labelled, batches, digits, patches
from headwise.papers.point import Point
from headwise.papers.small import Classifier, Heads, Shape, parameters
from headwise.papers.training import fit, seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.theory.intrinsic_dimension import reversal_score

PATCH, HEAD_DIM, LAYERS = 2, 8, 2
CONTROL_WIDTH = 64
BATCH = 64
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """Heads and side of the canvas; the control shares 64 dimensions among its heads."""

    heads: int
    side: int
    control: bool
    seed: int = 0
    steps: int = 800

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Canvas 8, 12, 16 (17 to 65 tokens in the paper's counting); quick: two canvases, two head counts."""
        if size == "quick":
            return [cls(h, side, False, seed, 150) for h in (1, 8) for side in (8, 12) for seed in range(seeds or 1)]
        cells = [(h, side, control) for side in (16, 12, 8) for control in (False, True) for h in (1, 2, 4, 8, 16)]
        return [cls(*cell, seed=seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Accuracy on training and held-out images."""
    data = on_canvas(settings.side, settings.seed)
    width = CONTROL_WIDTH if settings.control else HEAD_DIM * settings.heads
    tokens = data.inputs.shape[1]
    shape = Shape(width, (Heads.square(settings.heads, width),) * LAYERS, 2 * width, tokens, False, dropout=0.1)
    model = seeded(settings.seed, lambda: Classifier(shape, nn.Linear(PATCH**2, width), 10))
    fit(model, batches(data, BATCH), F.cross_entropy, steps=settings.steps, rate=2e-3, seed=settings.seed, decay=0.01)
    with torch.no_grad():
        right = (model(data.inputs).argmax(1) == data.labels).float()
    return {
        "train": float(right[: data.train].mean()),
        "held_out": float(right[data.train :].mean()),
        "parameters": parameters(model),
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """More heads raise training accuracy, larger canvases lower it until there are enough heads; the control."""
    plain = _mean(points, "train", False)
    heads = sorted({h for h, _ in plain})
    sides = sorted({side for _, side in plain})
    rises = [plain[heads[-1], side] - plain[heads[0], side] for side in sides]
    scores = [float(reversal_score([1 - plain[h, side] for side in sides])) for h in heads]
    first = next((h for h, score in zip(heads, scores) if score > 0), None)
    status = HELD if min(rises) > 0 else CONDITIONAL if max(rises) > 0 else FAILED
    shown = ", ".join(f"canvas {side}: {plain[heads[0], side]:.2f} -> {plain[heads[-1], side]:.2f}" for side in sides)
    scored = "/".join(f"{score:.2g}" for score in scores)
    verdicts = [
        Verdict("images", status, f"training accuracy, {heads[0]} -> {heads[-1]} heads: {shown}"),
        Verdict(
            "images-reversal",
            CONDITIONAL if first not in {None, heads[0]} else FAILED,
            f"reversal score {scored} for {'/'.join(map(str, heads))} heads, first positive at {first}",
            "other data, so where it turns cannot be compared; scores of nearly equal accuracies are noise",
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
        tops = [max(held[False][h, side] for h in heads) - held[False][heads[-1], side] for side in sides]
        verdicts.append(
            Verdict(
                "images-held-out",
                HELD if min(tops) > NOISE else CONDITIONAL if max(tops) > NOISE else FAILED,
                "held-out accuracy: "
                + ", ".join(
                    f"canvas {side}: {'/'.join(f'{held[False][h, side]:.2f}' for h in heads)}, at one width "
                    f"{'/'.join(f'{held[True][h, side]:.2f}' for h in heads)}"
                    for side in sides
                ),
                f"below its best at {heads[-1]} heads by {min(tops):.3f} to {max(tops):.3f}",
            )
        )
    return verdicts


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
            found = _mean(points, kind, control)
            for side in sorted({side for _, side in found}):
                heads = sorted(h for h, s in found if s == side)
                label = f"{kind.replace('_', ' ')}, canvas {side}"
                lines.append(Line(label, tuple(map(float, heads)), tuple(found[h, side] for h in heads)))
        if lines:
            charts.append(Chart(f"Digits on a canvas, {name}", "heads", "accuracy", tuple(lines), True))
    return charts


def on_canvas(side: int, seed: int) -> Labelled:
    """Digits at random places of a ``side`` x ``side`` canvas, filled with the mean of their border, in patches."""
    data = digits()
    images = data.inputs
    generator = torch.Generator().manual_seed(seed)
    border = torch.cat([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], dim=1).mean(1)
    canvas = border[:, None, None].repeat(1, side, side)
    starts = torch.randint(side - DIGIT_SIDE + 1, (len(images), 2), generator=generator)
    for image, place, (top, left) in zip(images, canvas, starts.tolist()):
        place[top : top + DIGIT_SIDE, left : left + DIGIT_SIDE] = image
    return Labelled(patches(canvas, PATCH), data.labels, data.train)


def _mean(points: Sequence[Point[Settings]], kind: str, control: bool) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], list[float]] = {}
    for settings, outcome in points:
        if settings.control == control:
            found.setdefault((settings.heads, settings.side), []).append(outcome[kind])
    return {key: float(np.mean(values)) for key, values in found.items()}
