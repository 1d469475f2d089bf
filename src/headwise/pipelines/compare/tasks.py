"""The pieces of a comparison, each of which can run in any process that sees the same files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headwise.files.errors import Failed, InputError
from headwise.files.reading import Reader, read_json
from headwise.files.writing import write_text
from headwise.records.comparison import Trial
from headwise.records.plan import Plan
from headwise.records.training import Training
from headwise.steps.train.examples import Examples, Progress
from headwise.steps.train.fitting import Task, fit_plan, read_examples, run_hash
from headwise.steps.train.pace import paces
from headwise.training.processes import join_processes, use_bf16
from headwise.training.work import Work

DATA, TASKS, PACE = "data", "tasks", "pace.json"
HASH, SEAL = "inputs_hash", "sha256"
Note = Callable[[str], None]
HASH = "inputs_hash"
LEAST_PACE = 1e-6  # tokens per second
APART = 100  # times the slowest that the fastest of shapes to compare may be


@dataclass(frozen=True, slots=True)
class Setting:
    """What all tasks share: the files to learn from, the tokenizer, and the folder of the comparison."""

    files: tuple[Path, ...]
    tokenizer: str | None
    folder: Path
    trust_remote_code: bool = False

    def examples(self, plan: Plan, how: Training, progress: Progress = lambda done, total, what: None) -> Examples:
        """What is learnt from; tokens are made once."""
        trusted = {"trust_remote_code": self.trust_remote_code}
        return read_examples(plan, self.files, self.tokenizer, how, self.folder / DATA, progress, **trusted)


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens per second of all plans, measured side by side, and in what numbers to train."""

    setting: Setting
    plans: tuple[Plan, ...]
    how: Training
    data: str

    title = "speed"

    def known(self) -> dict[str, Any] | None:
        """What was measured for the same plans and settings before."""
        found = _known(self.setting.folder / PACE, self._hash())
        if found is None:
            return None
        paces = found.child("tokens_per_second").nested([len(self.plans)], least=LEAST_PACE)
        if max(paces) > APART * min(paces):
            raise found.child("tokens_per_second").error(f"expected speeds within a factor of {APART}")
        found.choice("precision", ("bf16", "fp32"))
        return found.content

    def run(self, progress: Progress, note: Note) -> dict[str, Any]:
        """Measure and put it down."""
        progress(0, 1, "timing all shapes in turns")
        folder = self.setting.folder
        accelerator = join_processes()
        first = self.plans[0]
        examples = self.setting.examples(first, self.how)
        half = use_bf16(accelerator, self.how.precision, first.width)
        task = Task(examples, self.how, half)
        found = {
            HASH: self._hash(),
            "tokens_per_second": paces([(plan, task) for plan in self.plans], accelerator.device),
            "precision": "bf16" if half else "fp32",
        }
        _put(folder / PACE, found)
        return found

    def _hash(self) -> str:
        how = replace(self.how, tokens=None, seed=0)
        return " ".join(run_hash(plan, self.data, how)[:16] for plan in self.plans)


@dataclass(frozen=True, slots=True)
class Learning:
    """One training of one shape. Its checkpoints lie in ``tasks`` until it is done, then only what came out."""

    setting: Setting
    name: str
    plan: Plan
    how: Training
    reading: Literal["tokens", "time"]
    data: str

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.name}-{self.reading}-seed{self.how.seed}"

    def known(self) -> Trial | None:
        """What came out, if it was done before."""
        found = _known(self._file(), self._hash())
        if found is None:
            return None
        trial = Trial.read(found)
        if (trial.shape, trial.seed, trial.reading) != (self.name, self.how.seed, self.reading):
            raise found.error(f"expected the training {self.title}")
        return trial

    def run(self, progress: Progress, note: Note) -> Trial:
        """Train from the last checkpoint on, and put down what comes out."""
        folder = self._file().with_suffix("")
        examples = self.setting.examples(self.plan, self.how)
        work = Work(folder, self._hash())
        task = Task(examples, self.how, self.how.precision == "bf16")
        try:
            fit_plan(join_processes(), self.plan, task, work, progress)
        except (InputError, Failed) as error:
            raise type(error)(f"{self.title}: {error}") from None
        for text in work.notes:
            note(f"{self.title}: {text}")
        curve = tuple((line["tokens"], line["scores"]["loss"]) for line in work.metrics() if "scores" in line)
        tokens, loss = curve[-1]
        best = min(each for _, each in curve)
        found = Trial(self.name, self.how.seed, self.reading, tokens, loss, best, curve)
        _put(self._file(), {HASH: self._hash(), **asdict(found)})
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def _file(self) -> Path:
        return self.setting.folder / TASKS / f"{self.title}.json"

    def _hash(self) -> str:
        return run_hash(self.plan, self.data, self.how)


def _put(file: Path, found: Mapping[str, Any]) -> None:
    """Write what came out, sealed by a hash of it."""
    write_text(file, json.dumps({**found, SEAL: _seal(found)}))


def _known(file: Path, inputs_hash: str) -> Reader | None:
    """What was put into ``file`` for the same inputs, or an `InputError` where it was changed since."""
    if not file.is_file():
        return None
    found = read_json(file)
    if found.pop(SEAL, None) != _seal(found):
        raise InputError(f"{file} was changed since headwise compare wrote it; remove it, and it is made again.")
    return Reader(found, f"{file}") if found.get(HASH) == inputs_hash else None


def _seal(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
