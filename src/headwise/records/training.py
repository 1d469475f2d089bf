"""The settings of training a new model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headwise.files.errors import InputError

CURVE = "training.jsonl"  # beside a trained model: its metrics, line by line
SLOWEST = 3e-5
Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Training:
    """Tokens, learning rate, batches. ``batch`` is the number of windows a process takes at once.

    Open until plan and data are known: ``tokens`` (once through the data), ``rate`` (`usual_rate`) and ``context``
    (the plan's). The last ``held_out`` tokens of the data are evaluated on, ``evaluations`` times.
    """

    tokens: int | None = None
    rate: float | None = None
    context: int | None = None
    batch: int = 8
    accumulate: int = 1
    decay: float = 0.1
    held_out: int = 16_384
    evaluations: int = 10
    precision: Precision = "auto"
    seed: int = 0

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
