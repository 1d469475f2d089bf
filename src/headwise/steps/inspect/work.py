"""Half-finished measurements, put away now and then so that a rerun continues where a killed run stopped."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from headwise.checkpoints.tensor_files import read_tensors, write_tensors

FILE = "unfinished.safetensors"
SECONDS_BETWEEN = 15.0


class Work:
    """The unfinished measurement in a run folder. ``inputs_hash`` says what it is a measurement of."""

    def __init__(self, folder: Path, inputs_hash: str) -> None:
        self.path = folder / FILE
        self.inputs_hash = inputs_hash
        self.saved = time.monotonic()

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """Batches done so far and their sums; nothing where there is no work or it was of something else."""
        unfinished = read_tensors(self.path, self.inputs_hash)
        return (0, {}) if unfinished is None else (int(unfinished[0]["done"]), unfinished[1])

    def save(self, done: int, state: dict[str, Tensor]) -> None:
        """Put the sums away if the last time is long enough ago."""
        if time.monotonic() - self.saved < SECONDS_BETWEEN:
            return
        write_tensors(self.path, state, {"inputs_hash": self.inputs_hash, "done": str(done)})
        self.saved = time.monotonic()

    def finish(self) -> None:
        """Forget the work: the result is written."""
        self.path.unlink(missing_ok=True)
