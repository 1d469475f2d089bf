"""Scores of a model on small generated exercises and on tasks of others, with intervals of what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import sqrt
from statistics import fmean, stdev

from headwise.files.reading import Reader

Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean difference from the first model in the same trials, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_shares(cls, first: Sequence[float], own: Sequence[float], decisions: float = 1.0) -> Difference | None:
        """Of the shares that are right in each trial, which are means over so many ``decisions``.

        After Agresti and Min (Statistics in Medicine 24, 2005): half a decision is added for each of the four outcomes
        of a pair, so that no difference in a few trials is not taken for none at all. Trials are what is independent.
        """
        pairs = [mine - theirs for mine, theirs in zip(own, first, strict=True)]
        if len(pairs) == 1:
            return None
        every = len(pairs) * decisions + 2
        centre = sum(pairs) * decisions / every
        squares = decisions**2 * sum((pair - centre) ** 2 for pair in pairs) + 1 + 2 * centre**2
        half = student(len(pairs) - 1) * sqrt(squares) / every
        return cls(fmean(pairs), max(-1.0, centre - half), min(1.0, centre + half))

    @classmethod
    def of_nats(cls, first: Sequence[float], own: Sequence[float]) -> Difference | None:
        """Of nats in each trial, by their spread; None of a single trial."""
        pairs = [mine - theirs for mine, theirs in zip(own, first, strict=True)]
        if len(pairs) == 1:
            return None
        half = student(len(pairs) - 1) * stdev(pairs) / sqrt(len(pairs))
        mean = fmean(pairs)
        return cls(mean, mean - half, mean + half)


def student(freedom: int) -> float:
    """Half the width of a 95 % interval in standard errors, by the first terms of the expansion of Student's t."""
    first, second = (Z**2 + 1) / 4, (5 * Z**4 + 16 * Z**2 + 3) / 96
    return Z * (1 + first / freedom + second / freedom**2)


@dataclass(frozen=True, slots=True)
class SkillScores:
    """One skill, or the part of it that an ``axis`` names: the share of decisions that are right.

    ``nats``: of the right answer among those on offer (``chance``: the share that guessing gets right). Both
    differences are from the first model, in the same trials.
    """

    skill: str
    axis: str
    part: str
    trials: int
    decisions: int
    right: float
    chance: float | None = None
    nats: float | None = None
    right_difference: Difference | None = None
    nats_difference: Difference | None = None

    @property
    def name(self) -> str:
        """What to call it in a table."""
        return f"{self.skill}, {self.part}" if self.part else self.skill


@dataclass(frozen=True, slots=True)
class TaskScores:
    """One metric of a task of lm-evaluation-harness, and its standard error where there is one."""

    task: str
    metric: str
    value: float
    error: float | None = None


def read_skill(row: Reader) -> SkillScores:
    """A skill of a scores file."""
    row.only(*(item.name for item in fields(SkillScores)))
    return SkillScores(
        skill=row.text("skill"),
        axis=row.text("axis"),
        part=row.text("part"),
        trials=row.integer("trials", least=1),
        decisions=row.integer("decisions", least=1),
        right=row.number("right", least=0),
        chance=row.number("chance", least=0) if row.has("chance") else None,
        nats=row.number("nats") if row.has("nats") else None,
        right_difference=_difference(row, "right_difference"),
        nats_difference=_difference(row, "nats_difference"),
    )


def read_task(row: Reader) -> TaskScores:
    """A task of a scores file."""
    row.only(*(item.name for item in fields(TaskScores)))
    error = row.number("error", least=0) if row.has("error") else None
    return TaskScores(row.text("task"), row.text("metric"), row.number("value"), error)


def _difference(row: Reader, name: str) -> Difference | None:
    if not row.has(name):
        return None
    child = row.child(name)
    child.only(*(item.name for item in fields(Difference)))
    return Difference(*(child.number(item.name) for item in fields(Difference)))
