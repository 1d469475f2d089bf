"""A real language model under the claims of paper `allocation`: SmolLM2-135M, 30 layers of 9 heads of 64.

All of it is what `headwise inspect` measures on any model: how sharp softmax is by length, how far logits spread, how
sensitive attention and the loss are to narrower heads, and how evenly a layer's heads matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from headwise.papers.kit.point import Point
from headwise.pipelines.profile import inspect_folder
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict
from headwise.records.profile import LayerProfile, rounded
from headwise.records.settings import InspectConfig
from headwise.steps.demo import demo_model

SHORTEST = 64  # tokens
NEAR = 0.1
CLEARLY = 0.9  # of the other third of the layers
MEANS = {"norm": "jacobian_mean", "spread": "logit_spread", "rows": "cut_rows"}  # over heads


@dataclass(frozen=True, slots=True)
class Settings:
    """How much of headwise's text is read, and the seed of the labels that stand for the loss."""

    tokens: int = 8192
    longest: int = 1024
    seed: int = 0

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """One measurement for each seed; quick: of two short windows."""
        windows = (512, 256) if size == "quick" else (8192, 1024)
        return [cls(*windows, seed) for seed in range(seeds or 1)]


def run(settings: Settings) -> dict[str, Any]:
    """By layer: means over heads by length and by width, and the predicted loss increase of removing each head."""
    lengths = tuple(SHORTEST * 2**i for i in range((settings.longest // SHORTEST).bit_length()))
    with TemporaryDirectory() as folder:
        model = str(demo_model())
        config = InspectConfig(tokens=settings.tokens, lengths=lengths, seed=settings.seed)
        profile = inspect_folder(model, Path(folder), config=config)
    first = profile.layers[0]
    return {
        "lengths": list(first.lengths),
        "widths": list(first.widths),
        "layers": [_layer(layer) for layer in profile.layers],
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Slopes and spreads over length; early against late layers: what narrower heads cost, how evenly heads matter."""
    lengths, widths = points[0].outcome["lengths"], points[0].outcome["widths"]
    norm, spread, rows = (_values(points, name) for name in ("norm", "spread", "rows"))
    slopes = np.polyfit(np.log(lengths), np.log(norm).T, 1)[0]
    growth = spread[:, -1] / spread[:, 0]
    narrowest = _thirds(rows[:, 0])
    increases = {name: _thirds(_values(points, name)) for name in ("qk_damage", "v_damage")}
    easier = [late < CLEARLY * early for early, late in (narrowest, *increases.values())]
    used = _thirds(np.array([_evenly(heads) for heads in _values(points, "head_damage")]))
    return [
        Verdict(
            "real-saturation",
            HELD if slopes.mean() < -1 + NEAR else CONDITIONAL if slopes.mean() < -NEAR else FAILED,
            f"slope of the norm over length: mean {slopes.mean():.2f}, layers {slopes.min():.2f} to {slopes.max():.2f}",
            f"{lengths[0]} to {lengths[-1]} tokens; 1/L would be -1; below {-1 + NEAR} in "
            f"{int((slopes < -1 + NEAR).sum())} of {len(slopes)} layers",
        ),
        Verdict(
            "real-logits",
            HELD if growth.mean() > 1 + NEAR else FAILED,
            f"spread of logits at {lengths[-1]} over {lengths[0]} tokens: mean {growth.mean():.2f}, layers "
            f"{growth.min():.2f} to {growth.max():.2f}; largest spread {spread.max():.1f}",
        ),
        Verdict(
            "real-later-layers",
            HELD if all(easier) else CONDITIONAL if any(easier) else FAILED,
            f"first against last third of the layers: attention moved by cutting queries and keys to {widths[0]} "
            f"dimensions {_against(narrowest, '.3f')}; predicted loss increase of halving queries and keys "
            f"{_against(increases['qk_damage'], '.4f')} nats, values {_against(increases['v_damage'], '.4f')} nats a "
            "layer",
            "medians over layers",
        ),
        Verdict(
            "dominant-heads",
            HELD if used[1] < CLEARLY * used[0] else FAILED,
            f"share of a layer's heads that its predicted loss increase is spread over, first against last third: "
            f"{_against(used, '.2f')}",
            "predicted loss increase of removing each head; (sum)^2 / sum of squares / heads: 1 if all matter alike",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Norms over length, and what halving costs over layers."""
    lengths = tuple(map(float, points[0].outcome["lengths"]))
    norm = _values(points, "norm")
    shown = range(0, len(norm), max(1, len(norm) // 5))
    layers = tuple(map(float, range(len(norm))))
    halved = [
        Line(name, layers, tuple(map(float, _values(points, key))))
        for name, key in (("queries and keys", "qk_damage"), ("values", "v_damage"))
    ]
    return [
        Chart(
            "SmolLM2-135M: Jacobian norm",
            "length",
            "mean norm",
            tuple(Line(f"layer {i}", lengths, tuple(map(float, norm[i]))) for i in shown),
            True,
            True,
        ),
        Chart("SmolLM2-135M: heads of half the width", "layer", "predicted loss increase, nats", tuple(halved)),
    ]


def _layer(layer: LayerProfile) -> dict[str, Any]:
    values = layer.values
    means = {short: np.mean(values[name], axis=0).tolist() for short, name in MEANS.items()}
    halves = {name: values[name][len(values[name]) // 2] for name in ("qk_damage", "v_damage")}
    quantities = {**means, **halves, "head_damage": values["head_damage"]}
    return {name: rounded(value) for name, value in quantities.items()}


def _values(points: Sequence[Point[Settings]], name: str) -> np.ndarray:
    """One quantity of all layers, mean over seeds."""
    return np.mean([[layer[name] for layer in outcome["layers"]] for _, outcome in points], axis=0)


def _thirds(by_layer: np.ndarray) -> tuple[float, float]:
    """Medians of the first and of the last third of the layers."""
    third = len(by_layer) // 3
    return float(np.median(by_layer[:third])), float(np.median(by_layer[-third:]))


def _evenly(increases: np.ndarray) -> float:
    return float(increases.sum() ** 2 / (increases**2).sum() / len(increases))


def _against(pair: tuple[float, float], digits: str) -> str:
    return f"{pair[0]:{digits}} against {pair[1]:{digits}}"
