"""Runs grids of settings in parallel, here or on Ray; finished settings are not run again."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress
from headwise.papers.catalogue import module_of
from headwise.papers.kit.point import Point
from headwise.pipelines.ray import on_ray
from headwise.records.papers import Findings, Outcome, outcome_path


@dataclass(frozen=True, slots=True)
class Job:
    """One setting of one experiment, as plain data."""

    paper: str
    experiment: str
    recipe: int
    settings: Mapping[str, Any]

    @classmethod
    def all(cls, paper: str, experiment: str, grid: Sequence[Any]) -> list[Job]:
        """One for each setting of a grid."""
        recipe = getattr(module_of(paper, experiment), "RECIPE", 1)
        return [cls(paper, experiment, recipe, asdict(settings)) for settings in grid]

    def path(self, folder: Path) -> Path:
        """Its file."""
        return outcome_path(folder, self.paper, self.experiment, self.recipe, self.settings)


@locking("folder", "papers run")
def run_grids(
    chosen: Sequence[tuple[str, str]],
    folder: Path,
    *,
    size: str,
    seeds: int | None = None,
    ray: bool = False,
    progress: Progress,
) -> list[Findings]:
    """Run what is left of the ``chosen`` experiments (paper, experiment), then check each; files go to ``folder``."""
    grids = {names: module_of(*names).Settings.grid(size, seeds) for names in chosen}
    jobs = [job for names, grid in grids.items() for job in Job.all(*names, grid)]
    left = [job for job in jobs if not job.path(folder).is_file()]
    missing = Counter((job.paper, job.experiment) for job in left)
    findings = {names: _check(*names, grid, folder, size) for names, grid in grids.items() if not missing[names]}
    done, failure = len(jobs) - len(left), None
    progress(done, len(jobs), "papers")
    for outcome in on_ray(measure, left) if ray else _on_cores(left):
        if isinstance(outcome, InputError):
            failure = outcome
            continue
        outcome.save(folder)
        names = (outcome.paper, outcome.experiment)
        missing[names] -= 1
        if not missing[names]:
            findings[names] = _check(*names, grids[names], folder, size)
        done += 1
        progress(done, len(jobs), "/".join(names))
    if failure is not None:
        raise failure
    return [findings[names] for names in grids]


def measure(job: Job) -> Outcome | InputError:
    """Run one setting in one thread; an `InputError` is returned, so that others go on."""
    torch.set_num_threads(1)
    module = module_of(job.paper, job.experiment)
    start = time.process_time()
    try:
        measured = module.run(module.Settings(**job.settings))
    except InputError as error:
        return error
    versions = {"headwise": version("headwise"), "torch": torch.__version__, "python": platform.python_version()}
    seconds = round(time.process_time() - start, 3)
    return Outcome(job.paper, job.experiment, job.recipe, job.settings, measured, seconds, versions)


def _on_cores(jobs: Sequence[Job]) -> Generator[Outcome | InputError, None, None]:
    if not jobs:
        return
    cores = min(len(jobs), os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=spawn, initializer=_end_with_parent) as pool:
        running = [pool.submit(measure, job) for job in jobs]
        try:
            for each in as_completed(running):
                yield each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _end_with_parent() -> None:
    """Without this the workers of a killed run would finish what they were given and then wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _check(paper: str, experiment: str, grid: Sequence[Any], folder: Path, size: str) -> Findings:
    module = module_of(paper, experiment)
    outcomes = [_load(job, folder) for job in Job.all(paper, experiment, grid)]
    points = [Point(settings, outcome.measured) for settings, outcome in zip(grid, outcomes, strict=True)]
    seconds = round(sum(outcome.seconds for outcome in outcomes), 1)
    try:
        verdicts, charts = tuple(module.check(points)), tuple(module.draw(points))
        findings = Findings(paper, experiment, size, len(grid), _seeds(grid), seconds, verdicts, charts)
        findings.save(folder)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # files may have been edited
        raise InputError(
            f"{folder / paper / experiment} holds outcomes that cannot be checked ({type(error).__name__}: {error}): "
            "remove those that were changed, and run again."
        ) from error
    return findings


def _load(job: Job, folder: Path) -> Outcome:
    path = job.path(folder)
    outcome = Outcome.load(path)
    if (outcome.paper, outcome.experiment, outcome.recipe) != (job.paper, job.experiment, job.recipe) or (
        json.dumps(outcome.settings, sort_keys=True) != json.dumps(job.settings, sort_keys=True)
    ):
        raise InputError(f"{path} is the outcome of other settings: remove it, and run again.")
    return outcome


def _seeds(grid: Sequence[Any]) -> int:
    """How many seeds a grid has: inside its settings, or as settings of their own."""
    inside = max(getattr(settings, "seeds", 1) for settings in grid)
    return max(inside, len({getattr(settings, "seed", 0) for settings in grid}))
