"""A small trained language model of paper `allocation`: saturation by length, one narrow head, narrow layers.

One setting trains one teacher and measures all of it: the softmax Jacobian and the spread of logits against length; one
head cut from 64 dimensions to 4 by SVD, beside an activation-weighted cut, before and after fine-tuning, in every
layer; and the whole model cut uniformly, by the paper's later-layers rule and by measured energy, at equal parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.linalg.saturation import jacobian_norms
from headwise.papers.allocation.narrow import Start, cut, energies, narrowed, with_constant
from headwise.papers.kit.data import characters, windows
from headwise.papers.kit.language import Reading, held_out, language_model, teach, validation_loss
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Attention, Shape, Small, uniform
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

HEADS, V_DIM = 4, 32
STARTS: tuple[Start, ...] = ("svd", "weighted")
SHORTEST = 4
CALIBRATION, TUNING = 8, 16
TUNE_RATE = 3e-3
NOISE = 0.002  # nats

NEAR = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """The teacher's size and the training steps of it and of its reduced models."""

    seed: int
    width: int = 128
    layers: int = 6
    qk_dim: int = 64
    length: int = 256
    steps: int = 1200
    tune: int = 200
    heal: int = 200

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """A teacher for each seed; quick: one of two thin layers."""
        if size == "quick":
            return [cls(seed, 64, 3, 32, 64, 150, 30, 15) for seed in range(seeds or 1)]
        return [cls(seed) for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Everything measured on one teacher."""
    layers = uniform(settings.layers, HEADS, settings.qk_dim, V_DIM)
    shape = Shape(settings.width, layers, 4 * settings.width, settings.length, True)
    reading = Reading(settings.length, max(1, 2048 // settings.length), settings.steps)
    teacher = language_model(shape, reading, settings.seed)
    draw_windows = windows(characters().train, settings.length, CALIBRATION)  # never what is evaluated on
    inputs, _ = draw_windows(torch.Generator().manual_seed(settings.seed))
    with torch.no_grad():
        seen = teacher.attention_inputs(inputs)
    ranks = [settings.qk_dim // share for share in (2, 4, 8, 16)]
    return {
        "loss": validation_loss(teacher, settings.length),
        "lengths": _lengths(settings.length),
        "by_length": [_by_length(a, x) for a, x in zip(teacher.attentions(), seen)],
        "ranks": ranks,
        "one_head": [_one_head(teacher, i, seen[i], ranks, settings) for i in range(settings.layers)],
        "whole": _whole(teacher, seen, inputs, settings),
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Slopes on a trained model; whether a narrow head follows its teacher; late against early; layers against all."""
    slopes = np.array(
        [[_slope(outcome["lengths"], row["norm"]) for row in outcome["by_length"]] for _, outcome in points]
    )
    growth = np.array([[row["spread"][-1] / row["spread"][0] for row in outcome["by_length"]] for _, outcome in points])
    return [
        Verdict(
            "trained-saturation",
            HELD if slopes.mean() < -1 + NEAR else CONDITIONAL if slopes.mean() < -NEAR else FAILED,
            f"slope of the norm over length by layer: {', '.join(f'{s:.2f}' for s in slopes.mean(0))}",
            f"1/L would be -1; up to {points[0].outcome['lengths'][-1]} characters",
        ),
        Verdict(
            "logits-grow",
            HELD if growth.mean() > 1 + NEAR else FAILED,
            f"spread of logits, longest over shortest, by layer: {', '.join(f'{g:.2f}' for g in growth.mean(0))}",
        ),
        *_heads(points),
        *_wholes(points),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Norms over length, one head's error over its width, whole models."""
    settings, outcome = points[0]
    x = tuple(map(float, outcome["lengths"]))
    lines = [Line(f"layer {i}", x, tuple(row["norm"])) for i, row in enumerate(outcome["by_length"])]
    charts = [Chart("Jacobian norm of a trained model", "length", "mean norm", tuple(lines), True, True)]
    for moment in ("before", "after"):
        lines = [
            Line(f"{start}, layer {i}", tuple(map(float, outcome["ranks"])), tuple(row[start][moment]))
            for start in STARTS
            for i, row in enumerate(outcome["one_head"])
            if i in {0, settings.layers - 1}
        ]
        title = f"One head cut from {settings.qk_dim} dimensions, {moment} tuning"
        charts.append(Chart(title, "dimensions", "total variation of its attention", tuple(lines), True))
    return charts


def _lengths(longest: int) -> list[int]:
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


@torch.no_grad()
def _by_length(attention: Attention, x_BTD: Tensor) -> dict[str, list[float]]:
    """Mean Jacobian norm and spread of logits of the rows that see L/2 to L tokens."""
    logits_BHTT = attention.logits(*attention.queries_and_keys(x_BTD))
    maps_BHTT = logits_BHTT.softmax(-1)
    norm, spread = [], []
    for length in _lengths(x_BTD.shape[1]):
        rows = range(length // 2, length)
        norm.append(float(jacobian_norms(maps_BHTT[:, :, length // 2 : length, :length]).mean()))
        spread.append(
            float(torch.stack([logits_BHTT[:, :, row, : row + 1].var(-1).mean() for row in rows]).mean().sqrt())
        )
    return {"norm": norm, "spread": spread}


def _one_head(teacher: Small, layer: int, x_BTD: Tensor, ranks: Sequence[int], settings: Settings) -> dict[str, Any]:
    """Total variation of the first head's rows after a cut, before and after tuning on attention rows."""
    attention = teacher.attentions()[layer]
    fresh = held_out(settings.length, 2 * TUNING)[0][TUNING:]
    with torch.no_grad():
        unseen_BTD = teacher.attention_inputs(fresh)[layer]
    by_start: dict[str, Any] = {}
    for start in STARTS:
        before, after = [], []
        for rank in ranks:
            left, right = (factor[0] for factor in cut(attention, x_BTD, rank, start))
            before.append(_variation(attention, unseen_BTD, left, right))
            left, right = _tuned(attention, x_BTD, left, right, settings.tune)
            after.append(_variation(attention, unseen_BTD, left, right))
        by_start[start] = {"before": before, "after": after}
    return by_start


def _student_rows(attention: Attention, x_BTD: Tensor, left: Tensor, right: Tensor) -> Tensor:
    seen = with_constant(x_BTD)
    logits_BTT = (seen @ left) @ (seen @ right).mT * attention.scale
    T = x_BTD.shape[1]
    return logits_BTT.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)


@torch.no_grad()
def _variation(attention: Attention, x_BTD: Tensor, left: Tensor, right: Tensor) -> float:
    teacher_BTT = attention.weights(x_BTD)[:, 0]
    student_BTT = _student_rows(attention, x_BTD, left, right).softmax(-1)
    return float((teacher_BTT - student_BTT).abs().sum(-1).mean() / 2)


def _tuned(attention: Attention, x_BTD: Tensor, left: Tensor, right: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Both factors after ``steps`` of Adam on the KL divergence from the teacher's rows."""
    with torch.no_grad():
        teacher_BTT = attention.weights(x_BTD)[:, 0]
    trained = [left.clone().requires_grad_(), right.clone().requires_grad_()]
    optimiser = torch.optim.Adam(trained, lr=TUNE_RATE)
    hidden = torch.ones(teacher_BTT.shape[-2:], dtype=torch.bool).triu(1)
    for _ in range(steps):
        logs_BTT = _student_rows(attention, x_BTD, *trained).log_softmax(-1).masked_fill(hidden, 0.0)
        loss = -(teacher_BTT * logs_BTT).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return trained[0].detach(), trained[1].detach()


def _whole(teacher: Small, seen: Sequence[Tensor], inputs: Tensor, settings: Settings) -> list[dict[str, Any]]:
    """Validation loss of models cut to the same sum of widths in three ways, before and after a short healing."""
    rows = []
    reading = Reading(settings.length, max(1, 2048 // settings.length), settings.heal, rate=5e-4)
    spectra = [energies(attention, x_BTD) for attention, x_BTD in zip(teacher.attentions(), seen)]
    for share in (4, 8):
        total = settings.layers * settings.qk_dim // share
        ways = {
            "uniform": [settings.qk_dim // share] * settings.layers,
            "later": _later(settings, total),
            "earlier": _later(settings, total)[::-1],
            "energy": _by_energy(spectra, total),
        }
        for way, ranks in ways.items():
            for start in STARTS:
                reduced = narrowed(teacher, inputs, ranks, start)
                before = validation_loss(reduced, settings.length)
                healed = copy.deepcopy(reduced)
                teach(healed, reading, settings.seed)
                after = validation_loss(healed, settings.length)
                rows.append(
                    {"way": way, "start": start, "ranks": ranks, "total": total, "before": before, "after": after}
                )
    return rows


def _later(settings: Settings, total: int) -> list[int]:
    """The first third of the layers twice as wide as their share, the rest narrower: the paper's advice."""
    first = -(-settings.layers // 3)
    wide = 2 * total // settings.layers
    rest = (total - first * wide) // (settings.layers - first)
    return [wide] * first + [rest] * (settings.layers - first)


def _by_energy(spectra: Sequence[Tensor], total: int) -> list[int]:
    """Widths that keep most of the energy of all heads' logits together; at least 1 each."""
    gains = sorted(
        ((float(value), layer) for layer, s_HK in enumerate(spectra) for value in s_HK.square().mean(0)[1:]),
        reverse=True,
    )
    ranks = [1] * len(spectra)
    for _, layer in gains[: total - len(ranks)]:
        ranks[layer] += 1
    return ranks


def _heads(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """The narrowest head: by start, and early against late layers."""
    last = {
        s: {m: np.array([[row[s][m][-1] for row in f["one_head"]] for _, f in points]) for m in ("before", "after")}
        for s in STARTS
    }
    svd, weighted = last["svd"], last["weighted"]
    rank, width = points[0].outcome["ranks"][-1], points[0].settings.qk_dim
    follows = svd["after"].mean() < 0.1  # noqa: PLR2004
    third = max(1, svd["after"].shape[1] // 3)
    early, late = svd["before"][:, :third].mean(), svd["before"][:, -third:].mean()
    return [
        Verdict(
            "one-head",
            HELD if follows else CONDITIONAL if svd["after"].mean() < svd["before"].mean() / 2 else FAILED,
            f"{width} -> {rank} dimensions, total variation of rows: SVD {svd['before'].mean():.3f}, tuned "
            f"{svd['after'].mean():.3f}",
            "mean over layers, held-out text",
        ),
        Verdict(
            "weighted-start",
            HELD if weighted["before"].mean() < svd["before"].mean() else FAILED,
            f"weighted by inputs {weighted['before'].mean():.3f}, tuned {weighted['after'].mean():.3f}; SVD "
            f"{svd['before'].mean():.3f}, tuned {svd['after'].mean():.3f}",
        ),
        Verdict(
            "later-layers",
            HELD if late < 0.9 * early else FAILED,
            f"SVD to {rank} dimensions: first third of the layers {early:.3f}, last third {late:.3f}; by layer "
            + ", ".join(f"{v:.3f}" for v in svd["before"].mean(0)),
        ),
    ]


def _wholes(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Extra loss of whole models by way of sharing, at the smaller total."""
    extra: dict[tuple[str, str, str], list[float]] = {}
    for _, outcome in points:
        least = min(row["total"] for row in outcome["whole"])
        for row in outcome["whole"]:
            if row["total"] == least:
                for moment in ("before", "after"):
                    extra.setdefault((row["way"], row["start"], moment), []).append(row[moment] - outcome["loss"])
    mean = {key: float(np.mean(values)) for key, values in extra.items()}
    shown = "; ".join(
        f"{way}: "
        + ", ".join(f"{start} {mean[way, start, 'before']:.3f} -> {mean[way, start, 'after']:.3f}" for start in STARTS)
        for way in ("uniform", "later", "earlier", "energy")
    )
    better, healed = (
        mean["later", "weighted", moment] < mean["uniform", "weighted", moment] - NOISE
        for moment in ("before", "after")
    )
    return [
        Verdict(
            "whole-model",
            HELD if better and healed else CONDITIONAL if better or healed else FAILED,
            f"extra loss, cut -> healed: {shown}",
            "equal parameters; later: the first third twice as wide, as the paper advises; earlier: its reverse",
        )
    ]


def _slope(lengths: Sequence[int], norms: Sequence[float]) -> float:
    return float(np.polyfit(np.log(lengths), np.log(norms), 1)[0])
