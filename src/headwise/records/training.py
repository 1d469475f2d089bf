"""The settings of training a new model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headwise.files.errors import InputError
from headwise.files.numbers import read_count, read_window
from headwise.records.settings import option

CURVE = "training.jsonl"  # beside a trained model: its metrics, line by line
SLOWEST = 3e-5
Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Tokens, learning rate, batches. ``batch`` is the number of windows a process takes at once.

    Open until plan and data are known: ``tokens`` (once through the data), ``rate`` (`usual_rate`) and ``context``
    (the plan's). The last ``held_out`` tokens of the data are evaluated on, ``evaluations`` times.
    """

    tokens: int | None = option(
        None, "Tokens to learn from, as 20M; by default once through the data.", metavar="N", read=read_count
    )
    rate: float | None = option(None, "Learning rate; by default what suits the size.", "--lr")
    context: int | None = option(None, "Tokens in a window; by default the plan's context.", read=read_window)
    batch: int = option(8, "Windows (pictures) that one process takes at once.")
    accumulate: int = option(1, "Batches that make one step.")
    decay: float = 0.1
    held_out: int = 16_384
    evaluations: int = option(10, "Times to measure on held-out data.")
    precision: Precision = option("auto", "auto: bf16 where the machine computes in it.")
    seed: int = option(0, "For the first weights and the order of windows.")

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name in ("tokens", "context", "batch", "accumulate", "held_out", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name.replace('_', ' ')} must be at least 1, got {value}.")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise InputError(f"The learning rate must be more than 0, got {self.rate}.")

    def facts(self) -> dict[str, Any]:
        """All settings, for hashes and cards."""
        return asdict(self)


def usual_rate(parameters: int) -> float:
    """A learning rate for a model of this size: Kaplan et al., Scaling Laws for Neural Language Models, eq. (D.1)."""
    return max(SLOWEST, 0.003239 - 0.0001395 * math.log(parameters))
