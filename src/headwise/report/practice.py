"""Cells of what models were asked: loss by position, generated exercises, tasks of lm-evaluation-harness."""

from __future__ import annotations

from headwise.records.scores import PartScores, Scores
from headwise.records.skills import Difference, SkillScores

Rows = list[tuple[str, list[str]]]


def with_error(value: float | None, error: float | None) -> str:
    """A number of nats and one standard error of it."""
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def stretches(scores: Scores) -> list[tuple[str, list[PartScores | None]]]:
    """The scores of all models at each stretch of positions."""
    names = {part.name: part.last for model in scores.models for part in model.parts if part.last is not None}
    own = [{part.name: part for part in model.parts} for model in scores.models]
    ordered = sorted(names, key=lambda name: names[name] or 0)
    return [(name, [parts.get(name) for parts in own]) for name in ordered]


def by_position(scores: Scores) -> Rows:
    """Loss of the first model, and what each other one adds."""
    return [(name, [_stretch(part) for part in parts]) for name, parts in stretches(scores)]


def _stretch(part: PartScores | None) -> str:
    if part is None or part.loss is None:
        return "-"
    if part.loss_increase is None:
        return with_error(part.loss, part.loss_error)
    kl = "" if part.kl is None else f", KL {part.kl:.4f}"
    return f"{part.loss_increase:+.4f} ±{part.loss_increase_error or 0:.4f}{kl}"


def exercises(scores: Scores, *, crossed: bool = False) -> Rows:
    """The share right of the first model, and of each other one with the interval of the difference.

    What is taken apart on two axes at once only if ``crossed``: few decisions are left of each.
    """
    own = [{skill.name: skill for skill in model.skills} for model in scores.models]
    named = {skill.name: skill.axis for model in scores.models for skill in model.skills}
    names = [name for name, axis in named.items() if (" and " in axis) == crossed]
    return [(name, [_skill(skills.get(name)) for skills in own]) for name in names]


def exercise_hint(scores: Scores) -> str:
    """What the cells of `exercises` mean."""
    seed = scores.settings.get("seed")
    return (
        f"Skills, share right (seed {seed}; in brackets the 95% interval of the difference from the first, in points)"
    )


def _skill(skill: SkillScores | None) -> str:
    if skill is None:
        return "-"
    chance = "" if skill.chance is None or skill.right_difference is not None else f" (chance {skill.chance:.0%})"
    return f"{skill.right:.1%}{chance}{_interval(skill.right_difference)}"


def _interval(difference: Difference | None) -> str:
    return "" if difference is None else f" ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"


def tasks(scores: Scores) -> Rows:
    """Every metric of every task."""
    own = [{(task.task, task.metric): task for task in model.tasks} for model in scores.models]
    named = dict.fromkeys(key for tasks in own for key in tasks)
    return [
        (" ".join(key), [with_error(t.value, t.error) if (t := tasks.get(key)) else "-" for tasks in own])
        for key in named
    ]
