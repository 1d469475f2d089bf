"""A training run on disk: checkpoints, the best weights, metrics. A rerun continues where a killed run stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.families.tensor_files import read_tensors, write_tensors
from headwise.records.files import write_text
from headwise.records.reading import Reader, read_lines

KEPT = 2  # checkpoints: should the last be lost, there is one before
METRICS, BEST = "metrics.jsonl", "best"
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Best:
    """Weights, when they were found and how well they score; less is better."""

    stage: str
    step: int
    score: float
    tensors: Tensors


class Work:
    """The folder of a run. ``inputs_hash`` says what it is a run of: files of another run are not read."""

    def __init__(self, folder: Path, inputs_hash: str) -> None:
        self.folder, self.inputs_hash = folder, inputs_hash
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, stage: str) -> tuple[int, Tensors]:
        """Steps of ``stage`` done and the tensors put away then; 0 and nothing where there is no checkpoint."""
        for path in reversed(self._checkpoints(stage)):
            found = read_tensors(path, self.inputs_hash)
            if found is not None:
                return int(found[0]["step"]), found[1]
        return 0, {}

    def save(self, stage: str, step: int, tensors: Tensors) -> None:
        """Put a checkpoint away, and forget all but the last two."""
        self._write(self.folder / f"{self._prefix(stage)}{step:08d}.safetensors", tensors, step=step)
        for path in self._checkpoints(stage)[:-KEPT]:
            path.unlink(missing_ok=True)

    def offer(self, stage: str, step: int, score: float, tensors: Tensors) -> None:
        """Put these weights away if none so far had a lower score."""
        best = self.best()
        if best is None or score < best.score:
            self._write(self._best, tensors, stage=stage, step=step, score=score)

    def best(self) -> Best | None:
        """The weights with the lowest score so far."""
        found = read_tensors(self._best, self.inputs_hash)
        if found is None:
            return None
        facts, tensors = found
        return Best(facts["stage"], int(facts["step"]), float(facts["score"]), tensors)

    def log(self, **facts: Any) -> None:
        """Add a line to the metrics."""
        path = self.folder / METRICS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self._line(facts))
        except OSError as error:
            error.filename = str(path)
            raise

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of this run so far; a line that a kill has cut short is left out."""
        return [
            {name: fact for name, fact in line.items() if name != "run"} for line in self._lines() if self._own(line)
        ]

    def forget_after(self, stage: str, step: int) -> None:
        """Take the metrics back to a checkpoint: what came after it is done again. Lines of other runs stay."""
        kept = [line for line in self._lines() if not self._own(line) or line["stage"] != stage or line["step"] <= step]
        write_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))

    def _write(self, path: Path, tensors: Tensors, **facts: Any) -> None:
        about = {"inputs_hash": self.inputs_hash, **{name: str(value) for name, value in facts.items()}}
        write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, about)

    def _checkpoints(self, stage: str) -> list[Path]:
        return sorted(self.folder.glob(f"{self._prefix(stage)}*.safetensors"))

    def _prefix(self, stage: str) -> str:
        return f"{stage}-{self.inputs_hash[:8]}-"

    @property
    def _best(self) -> Path:
        return self.folder / f"{BEST}-{self.inputs_hash[:8]}.safetensors"

    def _own(self, line: Mapping[str, Any]) -> bool:
        return line.get("run") == self.inputs_hash[:8]

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS
        return [_read_line(line) for line in read_lines(path)] if path.exists() else []

    def _line(self, facts: Mapping[str, Any]) -> str:
        return json.dumps({"run": self.inputs_hash[:8], **facts}) + "\n"


def _read_line(line: Reader) -> dict[str, Any]:
    """A line of the metrics, which has what every one of them has."""
    for name in ("run", "stage"):
        line.text(name)
    line.integer("step", least=0)
    if line.has("scores"):
        line.integer("tokens", least=0)
        line.scores("scores")
    return line.content
