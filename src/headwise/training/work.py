"""A training run on disk: checkpoints, the best weights, metrics. A rerun continues where a killed run stopped.

Nothing that was changed in between is relied on: tensors are sealed by a hash of themselves, each line of the metrics
by one of itself and of the line before it, and a checkpoint counts only with the metrics it was written after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.tensor_files import read_tensors, write_tensors
from headwise.files.errors import InputError
from headwise.files.reading import parse_json
from headwise.files.writing import write_text

KEPT = 2  # checkpoints: should the last be lost, there is one before
METRICS, BEST = "metrics.jsonl", "best"
RUN, SEAL = "run", "seal"
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Best:
    """The best weights so far: stage, step and held-out score; less is better."""

    stage: str
    step: int
    score: float
    tensors: Tensors


class Work:
    """The folder of a run. ``inputs_hash`` says what it is a run of: files of another run are not read.

    ``notes`` list what is not as this run had left it.
    """

    def __init__(self, folder: Path, inputs_hash: str) -> None:
        self.folder, self.inputs_hash = folder, inputs_hash
        self.notes: list[str] = []
        self._sealed: str | None = None  # the seal of the last line, once it is known
        folder.mkdir(parents=True, exist_ok=True)
        if any("scores" in line for line in self.metrics()) and self.best() is None:
            self._begin_anew()

    def load(self, stage: str) -> tuple[int, Tensors]:
        """Steps of ``stage`` done and the tensors of its last checkpoint; 0 and nothing where there is none."""
        seals = {"", *(line[SEAL] for line in self._own_lines())}
        for path in reversed(self._checkpoints(stage)):
            checkpoint = read_tensors(path, self.inputs_hash)
            if checkpoint is not None and checkpoint[0]["metrics"] in seals:
                return int(checkpoint[0]["step"]), checkpoint[1]
            self._note(f"{path} or the metrics beside it were changed, so this checkpoint is not taken.")
        return 0, {}

    def save(self, stage: str, step: int, tensors: Tensors) -> None:
        """Write a checkpoint, and remove all but the last two."""
        path = self.folder / f"{self._prefix(stage)}{step:08d}.safetensors"
        self._write(path, tensors, step=step, metrics=self._last_seal())
        for old in self._checkpoints(stage)[:-KEPT]:
            old.unlink(missing_ok=True)

    def offer(self, stage: str, step: int, score: float, tensors: Tensors) -> None:
        """Write these weights if none so far had a lower score."""
        best = self.best()
        if best is None or score < best.score:
            self._write(self._best, tensors, stage=stage, step=step, score=score)

    def best(self) -> Best | None:
        """The weights with the lowest score so far."""
        best = read_tensors(self._best, self.inputs_hash)
        if best is None:
            return None
        facts, tensors = best
        return Best(facts["stage"], int(facts["step"]), float(facts["score"]), tensors)

    def log(self, **facts: Any) -> None:
        """Add a line to the metrics."""
        path = self.folder / METRICS
        line = {RUN: self._name, **facts, SEAL: _seal(self._last_seal(), facts)}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            error.filename = str(path)
            raise
        self._sealed = line[SEAL]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of this run so far, up to one that a kill has cut short or that somebody has changed."""
        return [_facts(line) for line in self._own_lines()]

    def forget_after(self, stage: str, step: int) -> None:
        """Take the metrics back to a checkpoint: what came after it is done again. Lines of other runs stay."""
        self._keep(takewhile(lambda line: line["stage"] != stage or line["step"] <= step, self._own_lines()))

    def _begin_anew(self) -> None:
        """Forget all of this run: its best weights are lost, and without them its end could be another."""
        self._note(f"{self._best} is missing or was changed, so all of it is done again.")
        for path in self.folder.glob(f"*-{self._name}-*.safetensors"):
            path.unlink(missing_ok=True)
        self._keep(())

    def _keep(self, own: Any) -> None:
        """Write the metrics anew, with these lines as those of this run."""
        lines = [line for line in self._lines() if line.get(RUN) != self._name] + list(own)
        write_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        self._sealed = None

    def _write(self, path: Path, tensors: Tensors, **facts: Any) -> None:
        about = {"inputs_hash": self.inputs_hash, **{name: str(value) for name, value in facts.items()}}
        write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, about)

    def _checkpoints(self, stage: str) -> list[Path]:
        return sorted(self.folder.glob(f"{self._prefix(stage)}*.safetensors"))

    def _prefix(self, stage: str) -> str:
        return f"{stage}-{self._name}-"

    @property
    def _name(self) -> str:
        return self.inputs_hash[:8]

    @property
    def _best(self) -> Path:
        return self.folder / f"{BEST}-{self._name}.safetensors"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _last_seal(self) -> str:
        """The seal of the last line of this run. On first use, a line that a kill has cut short is removed."""
        if self._sealed is None:
            path, own = self.folder / METRICS, self._own_lines()
            if path.exists() and not path.read_bytes().endswith(b"\n"):
                self._keep(own)
            self._sealed = own[-1][SEAL] if own else ""
        return self._sealed

    def _own_lines(self) -> list[dict[str, Any]]:
        """Lines of this run, each of which follows from the one before."""
        lines, last = [], ""
        for line in self._lines():
            if line.get(RUN) == self._name and line.get(SEAL) == _seal(last, _facts(line)):
                lines.append(line)
                last = line[SEAL]
        return lines

    def _lines(self) -> list[dict[str, Any]]:
        path, lines = self.folder / METRICS, []
        for text in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(InputError):  # cut short by a kill; what was changed has no seal
                line = parse_json(text, f"{path}")
                if isinstance(line, dict):
                    lines.append(line)
        return lines


def _facts(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in line.items() if name not in (RUN, SEAL)}


def _seal(last: str, facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{last}{json.dumps(facts)}".encode()).hexdigest()[:16]
