"""More heads, fewer layers, trained: how the `arms` score against the baseline, and what conditioning does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headwise.linalg.ranks import gram_singular_values
from headwise.papers.depth.arms import ARMS, LONG_RANGE, Labels, Text, arm
from headwise.papers.kit.noise import margin
from headwise.papers.kit.point import Point
from headwise.papers.kit.small import Classifier, Shape, Small, parameters, uniform
from headwise.papers.kit.training import seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

STEPS = {"images": 800, "photos": 800, "text": 800, "listops": 1500}
QUICK_STEPS = 100
KEPT = ("images", "photos")  # where the paper claims no more than equal scores
WIDE = ("listops",)  # where heads keep their width in the paper's models, as far as their sizes tell
SINGULAR = 1e-8
CLEARLY, NOTABLE = 0.05, 0.01  # of log10 of a condition number; of a training loss
NOISE = {"images": 0.01, "photos": 0.01, "text": 0.005, "listops": 0.01}  # at least
TOLERANCE = 2  # times that much: a score that is not lower by more is kept


@dataclass(frozen=True, slots=True)
class Settings:
    """Data, arm, seed and the steps of the baseline."""

    data: str
    arm: str
    seed: int
    steps: int

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Every arm on all data with 3 seeds; quick: baseline, shallow and lean on images, briefly."""
        if size == "quick":
            arms = ("baseline", "shallow", "lean")
            return [cls("images", arm, seed, QUICK_STEPS) for arm in arms for seed in range(seeds or 1)]
        cells = [
            (data, arm, seed)
            for data in ("text", "listops", "photos", "images")
            for arm in (*ARMS, *(LONG_RANGE if data == "listops" else ()))
            for seed in range(seeds or 3)
        ]
        return [cls(*cell, STEPS[cell[0]]) for cell in cells]


def run(settings: Settings) -> dict[str, Any]:
    """Score on held-out data, training loss, parameters, seconds, and conditioning before and after."""
    stack, steps = arm(settings.data, settings.arm, settings.steps)
    sizes = uniform(stack.layers, stack.heads, stack.head_dim, stack.head_dim)
    work = Text() if settings.data == "text" else Labels(settings.data)
    shape = Shape(stack.width, sizes, stack.mlp, work.tokens, work.causal, work.positions)
    model = seeded(settings.seed, lambda: work.build(shape))
    before = _conditions(model, work.examples())
    start = time.process_time()
    losses = work.train(model, steps, settings.seed)
    seconds = time.process_time() - start
    return {
        "score": work.score(model),
        "training": float(np.mean(losses[-50:])),
        "parameters": parameters(model),
        "steps": steps,
        "seconds": round(seconds, 1),
        "before": before,
        "after": _conditions(model, work.examples()),
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Lean against baseline; what heads add to a shallow model; equal size and work; conditioning and loss."""
    scores, facts = _table(points)
    noise = _noise(points)
    verdicts = []
    for data, row in scores.items():
        judged = "lean wide" if data in WIDE else "lean"
        gap = row[judged] - row["baseline"]
        status = _kept(data, gap, noise) if data in KEPT else _beaten(gap, noise[data])
        listed = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
        sizes = ", ".join(f"{name} {facts[data][name]['parameters'] / 1000:.0f}k" for name in row)
        because = f"{judged} against baseline {gap:+.3f}, up to {noise[data]:.3f} counts as equal; parameters: {sizes}"
        verdicts.append(Verdict(f"lean-{data}", status, f"{_kind(data)}: {listed}", because))
    others = [_heads_pay(scores, noise), *_controls(scores, facts, noise), *_one_layer(scores, noise)]
    return [*verdicts, *others, _conditioning(points)]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Scores over parameters, one dot for each arm."""
    scores, facts = _table(points)
    return [
        Chart(
            f"Lean against baseline: {data}",
            "parameters",
            _kind(data),
            tuple(Line(name, (facts[data][name]["parameters"],), (value,)) for name, value in row.items()),
        )
        for data, row in scores.items()
    ]


def _beaten(gap: float, noise: float) -> str:
    """Whether a score is higher; as good counts as held under conditions."""
    return HELD if gap > noise else FAILED if gap < -noise else CONDITIONAL


def _kept(data: str, gap: float, noise: dict[str, float]) -> str:
    """Whether a score is kept, beyond doubt; doubt counts as held under conditions."""
    certain = gap - noise[data] >= -TOLERANCE * NOISE[data]
    return HELD if certain else FAILED if gap < -noise[data] else CONDITIONAL


def _heads_pay(scores: dict[str, dict[str, float]], noise: dict[str, float]) -> Verdict:
    """What more heads bring back of what fewer layers lose, where they lose anything."""
    lost = {data: row["baseline"] - row["shallow"] for data, row in scores.items()}
    gains = {data: row["lean"] - row["shallow"] for data, row in scores.items()}
    sized = {data: row["lean equal size"] - row["shallow equal size"] for data, row in scores.items() if _sized(row)}
    needed = [data for data in scores if lost[data] > noise[data]]
    wins = sum(gains[data] > noise[data] for data in needed)
    shown = ", ".join(f"{data} {-lost[data]:+.3f} and {gains[data]:+.3f}" for data in scores)
    return Verdict(
        "heads-pay",
        FAILED if not wins else HELD if wins == len(needed) else CONDITIONAL,
        f"half the depth, then twice the heads: {shown}",
        f"depth is missed in {len(needed)} of {len(scores)}, heads make up for it in {wins}; with the MLP widened to "
        "the size of the baseline heads add "
        + (", ".join(f"{data} {gain:+.3f}" for data, gain in sized.items()) or "(not run)"),
    )


def _controls(scores: dict[str, dict[str, float]], facts: dict[str, Any], noise: dict[str, float]) -> list[Verdict]:
    verdicts = []
    arms = (
        ("equal-depth", "more heads"),
        ("equal-depth-wide", "wider heads"),
        ("equal-size", "lean equal size"),
        ("equal-work", "lean equal work"),
        ("equal-time", "lean equal time"),
        ("equal-time-shallow", "shallow equal time"),
        ("head-width", "lean wide"),
        ("half-mlp", "lean half MLP"),
    )
    for claim, name in arms:
        gaps = {data: row[name] - row["baseline"] for data, row in scores.items() if name in row}
        if not gaps:
            continue
        if claim.startswith("equal-depth"):
            each = [HELD if gap > noise[data] else FAILED for data, gap in gaps.items()]
        else:
            each = [_kept(data, gap, noise) for data, gap in gaps.items()]
        times = {data: facts[data][name]["seconds"] / facts[data]["baseline"]["seconds"] for data in gaps}
        verdicts.append(
            Verdict(
                claim,
                each[0] if len(set(each)) == 1 else CONDITIONAL,
                "against the baseline "
                + ", ".join(f"{data} {gap:+.3f} (noise {noise[data]:.3f})" for data, gap in gaps.items()),
                "time against the baseline " + ", ".join(f"{data} {time:.2f}" for data, time in times.items()),
            )
        )
    return verdicts


def _one_layer(scores: dict[str, dict[str, float]], noise: dict[str, float]) -> list[Verdict]:
    """One layer of many heads against two layers of few, with fewer or hardly more parameters."""
    row = {name: score for name, score in scores.get("listops", {}).items() if name in LONG_RANGE}
    if not row:
        return []
    two, *ones = row.values()
    gap = min(ones) - two
    status = HELD if gap > noise["listops"] else CONDITIONAL if max(ones) >= two - noise["listops"] else FAILED
    shown = ", ".join(f"{name} {score:.3f}" for name, score in row.items())
    return [Verdict("one-layer", status, f"held-out accuracy: {shown}", "expressions of at most 48 words, not 2,000")]


def _conditioning(points: Sequence[Point[Settings]]) -> Verdict:
    """Whether more heads condition trained models better too, and whether that goes with a lower loss."""
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for settings, outcome in points:
        cell = (float(np.mean(outcome["before"])), float(np.mean(outcome["after"])), outcome["training"])
        rows.setdefault((settings.data, settings.arm), []).append(cell)
    mean = {key: np.mean(cells, axis=0) for key, cells in rows.items()}
    pairs = [(data, mean[data, "shallow"], mean[data, "lean"]) for data in dict.fromkeys(data for data, _ in mean)]
    better = [lean_[1] < shallow[1] - CLEARLY for _, shallow, lean_ in pairs]
    faster = [lean_[2] < (1 - NOTABLE) * shallow[2] for _, shallow, lean_ in pairs]
    both = [a and b for a, b in zip(better, faster)]
    shown = "; ".join(
        f"{data}: {s[0]:.1f} -> {x[0]:.1f} at the start, {s[1]:.1f} -> {x[1]:.1f} after, loss {s[2]:.3f} -> {x[2]:.3f}"
        for data, s, x in pairs
    )
    status = HELD if all(both) else CONDITIONAL if any(both) else FAILED
    return Verdict(
        "conditioning",
        status,
        f"twice the heads, log10 of the condition number: {shown}",
        f"better conditioned after training in {sum(better)} of {len(pairs)}, lower training loss in {sum(faster)}, "
        f"both in {sum(both)}",
    )


@torch.no_grad()
def _conditions(model: nn.Module, inputs: Tensor) -> list[float]:
    """For each layer the median log10 of the condition number of its heads' outputs side by side."""
    body = cast("Small", model.body if isinstance(model, Classifier) else model)
    logs = []
    for attention, x_BTD in zip(body.attentions(), body.attention_inputs(inputs)):
        s = gram_singular_values(attention.heads(x_BTD))
        worst = s[:, 0] / s[:, -1].clamp(min=SINGULAR * s[:, 0])
        logs.append(float(worst.log10().median()))
    return logs


def _table(points: Sequence[Point[Settings]]) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Mean scores, and means of parameters and seconds, by data and arm."""
    rows: dict[str, dict[str, list[Any]]] = {}
    for settings, outcome in points:
        rows.setdefault(settings.data, {}).setdefault(settings.arm, []).append(outcome)

    def mean(name: str) -> dict[str, dict[str, float]]:
        return {d: {a: float(np.mean([f[name] for f in some])) for a, some in row.items()} for d, row in rows.items()}

    size, seconds = mean("parameters"), mean("seconds")
    facts = {d: {a: {"parameters": size[d][a], "seconds": seconds[d][a]} for a in row} for d, row in rows.items()}
    return mean("score"), facts


def _noise(points: Sequence[Point[Settings]]) -> dict[str, float]:
    """For each data set the difference of mean scores up to which two arms count as equal."""
    cells: dict[str, dict[str, list[float]]] = {}
    for settings, outcome in points:
        cells.setdefault(settings.data, {}).setdefault(settings.arm, []).append(outcome["score"])
    return {data: margin(row.values(), NOISE[data]) for data, row in cells.items()}


def _sized(row: dict[str, float]) -> bool:
    return {"lean equal size", "shallow equal size"} <= set(row)


def _kind(data: str) -> str:
    return "minus nats per character" if data == "text" else "held-out accuracy"
