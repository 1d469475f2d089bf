"""Tables 2 to 5 of paper `heads`: the error of D-retrieval by heads and length, for one and two layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.papers.heads.lookups import LookUpModels, Shape, Task, train
from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict
from headwise.theory.heads_needed import heads_needed
from headwise.theory.intrinsic_dimension import estimate_intrinsic_dimension

SHARP = 20.0
LITTLE = 10.0
FIRST = 2  # table
FEWEST = 3  # lengths that make an order


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the paper: what varies, and its mean NMSE by head count for T = 8, 16, 32, 64, 128."""

    look_ups: int
    layers: int
    fixed_width: bool
    published: dict[int, tuple[float, ...]]

    @property
    def enough(self) -> int:
        """Heads at which the error should fall."""
        return heads_needed(self.look_ups, self.layers)


TABLES = {
    2: Table(
        4,
        1,
        False,
        {
            1: (7.01e-2, 1.09e-1, 1.10e-1, 1.14e-1, 1.45e-1),
            2: (7.31e-3, 8.41e-3, 9.42e-3, 1.31e-2, 1.47e-2),
            3: (6.94e-4, 6.40e-4, 9.09e-4, 1.31e-3, 1.58e-3),
            4: (6.10e-5, 4.36e-5, 4.80e-5, 8.75e-6, 5.23e-6),
            5: (3.35e-5, 1.10e-5, 4.91e-6, 4.19e-6, 3.99e-6),
        },
    ),
    3: Table(
        4,
        1,
        True,
        {
            1: (1.75e-2, 1.98e-2, 2.06e-2, 2.54e-2, 3.03e-2),
            2: (7.17e-3, 7.39e-3, 7.82e-3, 8.57e-3, 1.02e-2),
            3: (2.11e-4, 2.17e-4, 2.73e-4, 3.71e-4, 4.77e-4),
            4: (1.32e-6, 5.59e-7, 3.40e-7, 3.46e-7, 5.70e-7),
            5: (2.19e-6, 4.33e-7, 3.22e-7, 2.73e-7, 2.66e-7),
        },
    ),
    4: Table(
        3,
        1,
        True,
        {
            1: (1.38e-2, 1.63e-2, 1.84e-2, 2.17e-2, 2.31e-2),
            2: (1.09e-3, 7.08e-4, 7.24e-4, 7.76e-4, 1.11e-3),
            3: (4.18e-7, 1.72e-7, 1.17e-7, 3.58e-7, 2.11e-7),
            4: (5.56e-7, 1.22e-7, 6.89e-8, 1.85e-7, 3.48e-7),
        },
    ),
    5: Table(
        4,
        2,
        True,
        {
            1: (2.12e-4, 1.85e-4, 2.22e-4, 3.13e-4, 4.28e-4),
            2: (7.22e-6, 2.69e-6, 3.50e-6, 3.07e-6, 3.83e-6),
            3: (8.16e-6, 1.83e-6, 1.73e-6, 3.86e-6, 3.50e-6),
            4: (3.68e-6, 1.87e-6, 2.60e-6, 4.32e-6, 5.98e-6),
            5: (6.15e-6, 3.02e-6, 3.31e-6, 3.78e-6, 5.34e-6),
        },
    ),
}
LENGTHS = (8, 16, 32, 64, 128)
HEAD_DIM, WIDTH = 8, 32


@dataclass(frozen=True, slots=True)
class Settings:
    """One cell of a table: all its seeds are trained as one program."""

    table: int
    heads: int
    tokens: int
    seeds: int = 4
    steps: int = 5000
    rate: float = 0.01
    orthonormal: bool = True

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Full: every cell, longest first; with random directions the two beside the drop of table 2.

        Quick: the two cells beside each drop, at short lengths.
        """
        if size == "quick":
            around = [(number, table.enough - less) for number, table in TABLES.items() for less in (1, 0)]
            lengths = {2: (8, 16), 3: (8,), 4: (8,), 5: (8,)}
            cells = [(number, heads, T) for number, heads in around for T in lengths[number]]
            return [cls(*cell, seeds=seeds or 2, steps=1500) for cell in cells]
        cells = [(number, heads, T) for T in LENGTHS for number, table in TABLES.items() for heads in table.published]
        layers = {number: table.layers for number, table in TABLES.items()}
        several = [
            cls(*cell, seeds=seeds or (4 if layers[cell[0]] == 1 else 3), steps=5000 if layers[cell[0]] == 1 else 2000)
            for cell in cells
        ]
        enough = TABLES[FIRST].enough
        beside = [(heads, T) for heads in (enough - 1, enough) for T in LENGTHS]
        several += [cls(FIRST, heads, T, seeds=seeds or 4, orthonormal=False) for heads, T in beside]
        return sorted(several, key=lambda settings: -settings.tokens * layers[settings.table])


def run(settings: Settings) -> dict[str, Any]:
    """Validation NMSE of each seed."""
    table = TABLES[settings.table]
    head_dim = -(-WIDTH // settings.heads) if table.fixed_width else HEAD_DIM
    models = LookUpModels(Shape(settings.heads, head_dim, layers=table.layers), settings.seeds)
    return {
        "nmse": train(
            models,
            Task.draw(table.look_ups, settings.tokens, orthonormal=settings.orthonormal),
            settings.steps,
            settings.rate,
        )
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """The drop at enough heads in each table; order in T below it; the reversal score; what one more head adds."""
    points, random = ([p for p in points if p.settings.orthonormal is kind] for kind in (True, False))
    best, mean = _cells(points, np.min), _cells(points, np.mean)
    names = {2: "transition", 3: "fixed-width", 4: "three-look-ups", 5: "two-layers"}
    verdicts = [_drop(names[number], TABLES[number].enough, best[number], mean[number]) for number in TABLES]
    return [*verdicts, _random(random), _growth(best), _reversal(best), _spare(best), _seeds_that_fail(points)]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Each table as curves over T, one for each head count, beside the paper's."""
    best = _cells([point for point in points if point.settings.orthonormal], np.min)
    charts = []
    for number, table in TABLES.items():
        ours = [Line(f"{heads} heads", *_curve(cells)) for heads, cells in sorted(best[number].items())]
        theirs = [Line(f"{heads} heads, paper", LENGTHS, table.published[heads], True) for heads in best[number]]
        title = f"Table {number}: {table.look_ups} look-ups, {table.layers} layer{'s' * (table.layers > 1)}"
        charts.append(Chart(title, "tokens", "NMSE (best seed; paper: mean)", (*ours, *theirs), True, True))
    return charts


def _cells(points: Sequence[Point[Settings]], over: Any) -> dict[int, dict[int, dict[int, float]]]:
    """NMSE by table, heads and tokens, taken ``over`` seeds."""
    errors: dict[int, dict[int, dict[int, float]]] = {}
    for settings, outcome in points:
        row = errors.setdefault(settings.table, {}).setdefault(settings.heads, {})
        row[settings.tokens] = float(over(outcome["nmse"]))
    return errors


def _curve(cells: dict[int, float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    lengths = sorted(cells)
    return tuple(map(float, lengths)), tuple(cells[T] for T in lengths)


def _drop(claim: str, enough: int, best: dict[int, dict[int, float]], mean: dict[int, dict[int, float]]) -> Verdict:
    ratios = {T: best[enough - 1][T] / best[enough][T] for T in sorted(best[enough])}
    means = [mean[enough - 1][T] / mean[enough][T] for T in ratios]
    shown = ", ".join(f"{ratio:.0f}x at T={T}" for T, ratio in ratios.items())
    sharp = [ratio >= SHARP for ratio in ratios.values()]
    status = HELD if all(sharp) else CONDITIONAL if any(sharp) else FAILED
    return Verdict(
        claim,
        status,
        f"{enough - 1} -> {enough} heads, best seed: {shown}",
        f"mean of seeds: {min(means):.1f}x to {max(means):.1f}x",
    )


def _random(points: Sequence[Point[Settings]]) -> Verdict:
    """The drop of the first table where directions are not at right angles."""
    if not points:
        return Verdict("random-directions", OPEN, "in full only")
    best, mean = _cells(points, np.min)[FIRST], _cells(points, np.mean)[FIRST]
    return _drop("random-directions", TABLES[FIRST].enough, best, mean)


def _growth(best: dict[int, dict[int, dict[int, float]]]) -> Verdict:
    rises = []
    for number, table in TABLES.items():
        for heads, cells in best[number].items():
            if heads < table.enough and len(cells) > 1:
                rises.append((number, heads, cells[max(cells)] / cells[min(cells)]))
    up = sum(rise > 1 for *_, rise in rises)
    status = HELD if up == len(rises) else CONDITIONAL if up > len(rises) / 2 else FAILED
    shown = ", ".join(f"table {number}, {heads} heads {rise:.2f}x" for number, heads, rise in rises)
    return Verdict("growth", status, f"longest over shortest text: {shown}", f"{up} of {len(rises)} rows grow")


def _reversal(best: dict[int, dict[int, dict[int, float]]]) -> Verdict:
    right, shown = 0, []
    tables = [number for number in TABLES if all(len(cells) >= FEWEST for cells in best[number].values())]
    for number in tables:
        table = TABLES[number]
        heads = sorted(best[number])
        lengths = sorted(best[number][heads[0]])
        errors = [[best[number][h][T] for T in lengths] for h in heads]
        estimate = estimate_intrinsic_dimension(heads, errors, table.layers)
        first = next((h for h, score in zip(heads, estimate.scores) if score > 0), None)
        right += first == table.enough
        scores = "/".join(f"{score:.2g}" for score in estimate.scores)
        shown.append(
            f"table {number}: R = {scores}, first positive at {first}, "
            f"ours says D = {estimate.at_least}..{estimate.at_most}"
        )
    if not tables:
        return Verdict("reversal", OPEN, "in full only")
    status = HELD if right == len(tables) else CONDITIONAL if right else FAILED
    return Verdict("reversal", status, "; ".join(shown), f"first positive at enough heads in {right} of {len(tables)}")


def _spare(best: dict[int, dict[int, dict[int, float]]]) -> Verdict:
    gains = [
        best[number][table.enough][T] / best[number][table.enough + 1][T]
        for number, table in TABLES.items()
        for T in best[number].get(table.enough + 1, {})
    ]
    if not gains:
        return Verdict("spare-head", OPEN, "in full only")
    status = HELD if max(gains) < LITTLE else CONDITIONAL if np.median(gains) < LITTLE else FAILED
    return Verdict("spare-head", status, f"one head more than enough: {min(gains):.2f}x to {max(gains):.2f}x lower")


def _seeds_that_fail(points: Sequence[Point[Settings]]) -> Verdict:
    """Whether the mean over seeds hides a drop that the best seed shows; seeds that end 10 times above the best."""
    if max(len(outcome["nmse"]) for _, outcome in points) == 1:
        return Verdict("min-over-seeds", OPEN, "takes several seeds")
    best, mean = _cells(points, np.min), _cells(points, np.mean)
    drops = [
        tuple(cells[number][table.enough - 1][T] / cells[number][table.enough][T] for cells in (best, mean))
        for number, table in TABLES.items()
        for T in best[number][table.enough]
    ]
    hidden = sum(of_best >= SHARP > of_mean for of_best, of_mean in drops)
    rows = [outcome["nmse"] for settings, outcome in points if settings.heads == TABLES[settings.table].enough]
    stuck = sum(error > LITTLE * min(row) for row in rows for error in row)
    return Verdict(
        "min-over-seeds",
        HELD if hidden else FAILED,
        f"a {SHARP:.0f}-fold drop of the best seed that the mean does not show: {hidden} of {len(drops)} cells",
        f"{stuck} of {sum(map(len, rows))} seeds at just enough heads end {LITTLE:.0f}x above the best one",
    )
