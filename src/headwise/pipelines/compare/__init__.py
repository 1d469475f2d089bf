"""Several shapes trained on the same data, compared at equal parameters, equal tokens and equal wall-clock."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from headwise.data.sources import Datum, called, data_of
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_writable
from headwise.pipelines.compare.tasks import Learning, Note, Setting, Timing
from headwise.pipelines.ray import on_ray
from headwise.records.blueprint import Text
from headwise.records.comparison import Comparison, Contender, Trial
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig
from headwise.report.page.compare import write_compare_page
from headwise.steps.train import put_tokenizer
from headwise.steps.train.fitting import Task, check_plan, settled, whole_steps

RESULT, PAGE = "compare.json", "compare.html"
SAME = 0.01  # of its tokens that a shape must gain or lose by its speed to be trained again
HELD_OUT = 65_536  # tokens: differences between shapes are small
PLAIN = re.compile(r"\w[\w.-]*")  # names of plans, which become names of files
TWO = "A comparison takes at least two plans, in files or folders of different names."
PARTS = 1000  # of a task, as the progress bar counts


def compare_plans(
    plans: Mapping[str, Plan] | Sequence[Plan],
    *,
    data: Any,
    seeds: int = 3,
    tokenizer: Any = None,
    config: TrainConfig | None = None,
    on: Literal["local", "ray"] = "local",
    progress: Progress = silent,
) -> Comparison:
    """A model of every plan trained with every seed on the same ``data``, and compared; the first is the measure.

    ``plans`` have names or are numbered; ``data`` and ``tokenizer`` are as in `hw.train`. Read at equal parameters,
    tokens and wall-clock: each is trained on the same tokens, and where it is faster or slower than the first also on
    as many as it learns in the first's time.

    >>> candidates = hw.design(params=100_000, vocab=300, context=16).candidates
    >>> plans = {candidate.name: candidate.plan for candidate in candidates[:2]}
    >>> config = hw.TrainConfig(tokens=256, evaluations=1)
    >>> comparison = hw.compare(plans, data=text, seeds=1, config=config)
    >>> [contender.name for contender in comparison.contenders] == list(plans)
    True
    """
    if not isinstance(plans, Mapping):
        plans = {f"plan-{number}": plan for number, plan in enumerate(plans, start=1)}
    for name in plans:
        _check_name(name)
    _check_plans(plans)
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        place = put_tokenizer(tokenizer, Path(folder))
        return _compare(plans, data_of(data), Path(folder), seeds, place, config, on, progress=progress)


@locking("folder")
def compare(
    plan_files: Sequence[Path],
    data: Sequence[Path],
    folder: Path,
    *,
    seeds: int = 3,
    tokenizer: str | None = None,
    config: TrainConfig | None = None,
    on: Literal["local", "ray"] = "local",
    trust_remote_code: bool = False,
    progress: Progress = silent,
    note: Note = lambda text: None,
) -> Comparison:
    """Train a model of every plan with every seed on files, and write the comparison to ``folder``.

    A rerun skips finished trainings and resumes from checkpoints; ``note`` is called for checkpoints that were changed
    in between and are not used. ``trust_remote_code`` lets ``tokenizer`` run code of its own.
    """
    plans = _read_plans(plan_files)
    check_writable(folder / RESULT)
    comparison = _compare(plans, data, folder, seeds, tokenizer, config, on, trust_remote_code, progress, note)
    comparison.save(folder / RESULT)
    write_compare_page(comparison, folder / PAGE)
    return comparison


def _compare(
    plans: Mapping[str, Plan],
    data: Sequence[Datum],
    folder: Path,
    seeds: int,
    tokenizer: str | None,
    config: TrainConfig | None,
    on: Literal["local", "ray"],
    trust_remote_code: bool = False,
    progress: Progress = silent,
    note: Note = lambda text: None,
) -> Comparison:
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, got {seeds}.")
    first, config = next(iter(plans.values())), config or TrainConfig(held_out=HELD_OUT)
    if tokenizer is not None and (own := Path(tokenizer).expanduser()).exists():
        tokenizer = str(own.resolve())
    given = tuple(datum if isinstance(datum, str) else datum.expanduser().resolve() for datum in data)
    setting = Setting(given, tokenizer, folder.resolve(), trust_remote_code)
    examples = setting.examples(first, config, progress)
    config = settled(config, first, examples)
    step = Task(examples, config, half=False).step_tokens
    tokens = step * whole_steps(cast(int, config.tokens), step)
    config = replace(config, tokens=tokens)
    (timing,) = _done([Timing(setting, tuple(plans.values()), config, examples.sha256)], on, progress, note)
    config = replace(config, precision=timing["precision"])
    contenders = _contenders(plans, timing["tokens_per_second"], tokens, step)
    tasks = [
        Learning(setting, each.name, plans[each.name], replace(config, seed=seed, tokens=count), kind, examples.sha256)
        for seed in range(config.seed, config.seed + seeds)
        for each in contenders
        for kind, count in (("tokens", tokens), ("time", each.tokens_in_time))
        if kind == "tokens" or count != tokens
    ]
    trials = _all_readings(contenders, _done(tasks, on, progress, note))
    numbers = tuple(range(config.seed, config.seed + seeds))
    return Comparison(contenders, trials, tokens, numbers, called(data, whole=False), config.facts())


def _read_plans(files: Sequence[Path]) -> dict[str, Plan]:
    """Plans by the names of their files, of their folders where files are called alike; raises where they cannot be."""
    stems = [file.stem for file in files]
    names = [file.absolute().parent.name if stems.count(file.stem) > 1 else file.stem for file in files]
    plans = {name: Plan.load(file) for name, file in zip(names, files, strict=True)}
    for name in plans:
        _check_name(name)
    if len(plans) < len(files):
        raise InputError(TWO)
    _check_plans(plans)
    return plans


def _check_name(name: str) -> None:
    if not PLAIN.fullmatch(name):
        raise InputError(f"A plan is called {name!r}: use letters, digits, dots, - and _ only.")


def _check_plans(plans: Mapping[str, Plan]) -> None:
    if len(plans) < 2:  # noqa: PLR2004
        raise InputError(TWO)
    for name, plan in plans.items():
        try:
            check_plan(plan)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    ends = {name: _ends(plan) for name, plan in plans.items()}
    first, *others = ends
    for name in others:
        if ends[name] != ends[first]:
            raise InputError(
                f"{name} reads {ends[name]} and {first} reads {ends[first]}: only losses on the same can be compared."
            )


def _ends(plan: Plan) -> str:
    reads = plan.require_blueprint().reads
    if isinstance(reads, Text):
        return f"a vocabulary of {reads.vocab:,} in contexts of {reads.context:,}"
    return (
        f"{reads.channels} x {reads.size} x {reads.size} pixels in patches of {reads.patch} with {reads.labels} labels"
    )


def _contenders(plans: Mapping[str, Plan], speeds: Sequence[float], tokens: int, step: int) -> tuple[Contender, ...]:
    """All shapes with their sizes and speeds, and what they learn while the first learns ``tokens``: whole steps."""
    contenders = []
    for (name, plan), speed in zip(plans.items(), speeds, strict=True):
        gained = speed / speeds[0]
        count = tokens if abs(gained - 1) <= SAME else step * whole_steps(tokens * gained, step)
        contenders.append(Contender(name, plan.shape_to_build().total_parameters(), speed, count))
    return tuple(contenders)


def _done(tasks: Sequence[Any], on: str, progress: Progress, note: Note) -> list[Any]:
    """The results of all tasks, in any order; finished tasks are not run again."""
    results = [known for task in tasks if (known := task.known()) is not None]
    missing = [task for task in tasks if task.known() is None]
    if on == "ray" and missing:
        progress(len(results), len(tasks), "tasks on Ray")
        for result in on_ray(_quietly, missing, gpu=True):
            results.append(result)
            progress(len(results), len(tasks), "tasks on Ray")
        return results
    for number, task in enumerate(missing):
        results.append(task.run(_part(progress, task.title, number, len(missing)), note))
    return results


def _quietly(task: Any) -> Any:
    return task.run(silent, lambda text: None)


def _part(progress: Progress, title: str, number: int, count: int) -> Progress:
    """The progress of one task as a part of all."""

    def report(done: int, total: int, what: str) -> None:
        progress(PARTS * number + PARTS * done // total, PARTS * count, f"{title} ({number + 1} of {count}): {what}")

    return report


def _all_readings(contenders: Sequence[Contender], trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Trials in order; a shape that was not trained for its speed counts with the tokens it has."""
    for name, reading in {(trial.shape, trial.reading) for trial in trials}:
        curves = [trial.curve for trial in trials if (trial.shape, trial.reading) == (name, reading)]
        if len({tuple(tokens for tokens, _ in curve) for curve in curves}) > 1:
            raise InputError(f"The trainings of {name} were measured at different steps: remove those that are odd.")
    places = {each.name: place for place, each in enumerate(contenders)}
    timed = {trial.shape for trial in trials if trial.reading == "time"}
    more = [replace(trial, reading="time") for trial in trials if trial.shape not in timed]
    return tuple(sorted([*trials, *more], key=lambda trial: (places[trial.shape], trial.reading, trial.seed)))
