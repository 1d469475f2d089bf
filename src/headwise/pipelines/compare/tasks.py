"""The tasks of a comparison, each of which can run in any process that sees the same files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headwise.data.sources import Datum
from headwise.files.errors import Failed, InputError
from headwise.files.progress import Progress, silent
from headwise.files.reading import Reader, read_json
from headwise.files.writing import write_text
from headwise.records.comparison import Trial
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig
from headwise.steps.train.examples import Examples
from headwise.steps.train.fitting import Task, fit_plan, read_examples, run_hash
from headwise.steps.train.pace import paces
from headwise.training.processes import join_processes, use_bf16
from headwise.training.work import Work

DATA, TASKS, PACE = "data", "tasks", "pace.json"
HASH, SEAL = "inputs_hash", "sha256"
Note = Callable[[str], None]
LEAST_PACE = 1e-6  # tokens per second
APART = 100  # times the slowest that the fastest of shapes to compare may be


@dataclass(frozen=True, slots=True)
class Setting:
    """What all tasks share: what to learn from, the tokenizer, and the folder of the comparison."""

    data: tuple[Datum, ...]
    tokenizer: str | None
    folder: Path
    trust_remote_code: bool = False

    def examples(self, plan: Plan, config: TrainConfig, progress: Progress = silent) -> Examples:
        """The training examples; text is tokenised once."""
        trusted = {"trust_remote_code": self.trust_remote_code}
        return read_examples(plan, self.data, self.tokenizer, config, self.folder / DATA, progress, **trusted)


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens per second of all plans, measured side by side, and the precision to train in."""

    setting: Setting
    plans: tuple[Plan, ...]
    config: TrainConfig
    data: str

    title = "speed"

    def known(self) -> dict[str, Any] | None:
        """The result of an earlier run with the same plans and settings."""
        record = _known(self.setting.folder / PACE, self._hash())
        if record is None:
            return None
        paces = record.child("tokens_per_second").nested([len(self.plans)], least=LEAST_PACE)
        if max(paces) > APART * min(paces):
            raise record.child("tokens_per_second").error(f"expected speeds within a factor of {APART}")
        record.choice("precision", ("bf16", "fp32"))
        return record.content

    def run(self, progress: Progress, note: Note) -> dict[str, Any]:
        """Measure, and write the result."""
        progress(0, 1, "timing all shapes in turns")
        folder = self.setting.folder
        accelerator = join_processes()
        first = self.plans[0]
        examples = self.setting.examples(first, self.config)
        half = use_bf16(accelerator, self.config.precision, first.width)
        task = Task(examples, self.config, half)
        timing = {
            HASH: self._hash(),
            "tokens_per_second": paces([(plan, task) for plan in self.plans], accelerator.device),
            "precision": "bf16" if half else "fp32",
        }
        _put(folder / PACE, timing)
        return timing

    def _hash(self) -> str:
        config = replace(self.config, tokens=None, seed=0)
        return " ".join(run_hash(plan, self.data, config)[:16] for plan in self.plans)


@dataclass(frozen=True, slots=True)
class Learning:
    """One training of one shape. Its checkpoints lie in ``tasks`` until it is done, then only its result."""

    setting: Setting
    name: str
    plan: Plan
    config: TrainConfig
    reading: Literal["tokens", "time"]
    data: str

    @property
    def title(self) -> str:
        """Its name in progress and file names."""
        return f"{self.name}-{self.reading}-seed{self.config.seed}"

    def known(self) -> Trial | None:
        """The result of an earlier run."""
        record = _known(self._file(), self._hash())
        if record is None:
            return None
        trial = Trial.read(record)
        if (trial.shape, trial.seed, trial.reading) != (self.name, self.config.seed, self.reading):
            raise record.error(f"expected the training {self.title}")
        return trial

    def run(self, progress: Progress, note: Note) -> Trial:
        """Train from the last checkpoint on, and write the result."""
        folder = self._file().with_suffix("")
        examples = self.setting.examples(self.plan, self.config)
        work = Work(folder, self._hash())
        task = Task(examples, self.config, self.config.precision == "bf16")
        try:
            fit_plan(join_processes(), self.plan, task, work, progress)
        except (InputError, Failed) as error:
            raise type(error)(f"{self.title}: {error}") from None
        for text in work.notes:
            note(f"{self.title}: {text}")
        curve = tuple((line["tokens"], line["scores"]["loss"]) for line in work.metrics() if "scores" in line)
        tokens, loss = curve[-1]
        best = min(each for _, each in curve)
        trial = Trial(self.name, self.config.seed, self.reading, tokens, loss, best, curve)
        _put(self._file(), {HASH: self._hash(), **asdict(trial)})
        shutil.rmtree(folder, ignore_errors=True)
        return trial

    def _file(self) -> Path:
        return self.setting.folder / TASKS / f"{self.title}.json"

    def _hash(self) -> str:
        return run_hash(self.plan, self.data, self.config)


def _put(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record, sealed by its hash."""
    write_text(file, json.dumps({**record, SEAL: _seal(record)}))


def _known(file: Path, inputs_hash: str) -> Reader | None:
    """The record in ``file`` if it is of the same inputs, or an `InputError` where it was changed since."""
    if not file.is_file():
        return None
    record = read_json(file)
    if record.pop(SEAL, None) != _seal(record):
        raise InputError(f"{file} was changed since headwise compare wrote it; remove it, and it is done again.")
    return Reader(record, f"{file}") if record.get(HASH) == inputs_hash else None


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()
