"""A folder made step by step: what each step was made from and what came of it, by content.

A step is done again where its inputs have changed or something of it is gone. What somebody else has put there or
changed is never built on, and never removed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.files.contents import contents_of
from headwise.files.errors import InputError
from headwise.files.reading import read_record
from headwise.files.writing import check_writable, write_record

KIND, VERSION = "run", 2
CARD = "README.md"  # scores are written into it later, and nothing is made from it: it only has to be there
REMEDY = "remove it or give another folder as `output`"


@dataclass(frozen=True, slots=True)
class Step:
    """Hashes of what a step was made from, and of each file that came of it, by its name in the folder."""

    inputs: str
    outputs: Mapping[str, str]


class Ledger:
    """The steps of ``folder``, kept in ``file`` there.

    Results are made in a workshop beside it and moved to their place when their hashes are noted, so that after a kill
    everything in the folder is either as noted or not ours.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self.folder, self.file = folder, folder / file
        self.workshop = self.file.with_suffix(".unfinished")
        self.steps = _read(self.file) if self.file.exists() else {}
        self._there: dict[str, str] = {}
        check_writable(self.file)

    def check(self, results: Sequence[str]) -> None:
        """Raise where one of ``results`` is there and not as this ledger knows it."""
        noted = {name: sha256 for step in self.steps.values() for name, sha256 in step.outputs.items()}
        self._there = {name: sha256 for each in results for name, sha256 in _contents(self.folder / each).items()}
        for name, sha256 in self._there.items():
            if name not in noted:
                raise InputError(f"{self.folder / name} exists already and was not made by this run: {REMEDY}.")
            if noted[name] != sha256:
                raise InputError(f"{self.folder / name} was changed since this run made it: {REMEDY}.")

    def do(self, step: str, results: Sequence[str], facts: Any, make: Callable[[Path], object]) -> Mapping[str, str]:
        """The contents of the ``results`` of a step; if need be ``make`` writes them into the folder it is given.

        ``facts`` are all that the results depend on.
        """
        inputs = hashlib.sha256(json.dumps([step, facts], sort_keys=True).encode()).hexdigest()
        place, known = self.workshop / f"{step}-{inputs[:16]}", self.steps.get(step)
        if known is None or known.inputs != inputs or not self._whole(known, place):
            if not all((place / name).exists() for name in results):
                make(place)
            self._clear(known, results)
            known = Step(inputs, {name: sha256 for each in results for name, sha256 in _contents(place / each).items()})
            self.steps[step] = known
            write_record(self.file, KIND, VERSION, {"steps": {name: asdict(step) for name, step in self.steps.items()}})
        for name in results:
            if (place / name).exists():
                (place / name).replace(self.folder / name)
        return known.outputs

    def close(self) -> None:
        """Clear the workshop away: all is in its place."""
        shutil.rmtree(self.workshop, ignore_errors=True)

    def _whole(self, known: Step, place: Path) -> bool:
        """Whether all that came of a step is in its place, or still lies ready in the workshop."""
        tops = {name.partition("/")[0] for name in known.outputs}
        ready = {name: sha256 for top in tops for name, sha256 in _contents(place / top).items()}
        return {**ready, **self._there}.items() >= known.outputs.items()

    def _clear(self, known: Step | None, results: Sequence[str]) -> None:
        """Remove what a step has left before, file by file: nothing of somebody else goes with it."""
        for name in known.outputs if known else ():
            if name in self._there:
                (self.folder / name).unlink()
        for path in (self.folder / name for name in results):
            for inside in sorted((path, *path.rglob("*")), reverse=True):
                with suppress(OSError):
                    inside.rmdir()
            if path.exists():
                raise InputError(f"{path} exists already and was not made by this run: {REMEDY}.")


def _contents(path: Path) -> dict[str, str]:
    return {name: "" if name.endswith(f"/{CARD}") else sha256 for name, sha256 in contents_of(path).items()}


def _read(file: Path) -> dict[str, Step]:
    reader = read_record(file, KIND, VERSION)
    if reader.integer("version") < VERSION:
        return {}  # it noted no contents, so it cannot vouch for anything
    steps, noted = {}, reader.child("steps")
    for name in reader.mapping("steps"):
        step = noted.child(name)
        outputs = step.child("outputs")
        steps[name] = Step(step.text("inputs"), {each: outputs.text(each) for each in step.mapping("outputs")})
    return steps
