"""How a reduced model is to be healed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headwise.files.errors import InputError
from headwise.files.numbers import read_count, read_window
from headwise.files.reading import read_lines
from headwise.records.settings import Precision, option

Stage = Literal["local", "global", "both"]
Train = Literal["attention", "values", "lora", "all"]
CURVE = "healing.jsonl"  # beside a healed model: how it went, line by line
RATES: dict[Train, float] = {"attention": 2e-3, "values": 2e-3, "lora": 1e-2, "all": 1e-3}  # of each weight's size
FAR = 0.4  # held-out score at which these are right; it grows with the square of the way that is left
ROUNDED_STEP = 2048  # tokens: gradients through rounding are noisy, smaller steps undo what they learn
LOCAL_RATES: dict[Train, float] = {"attention": 1e-2, "values": 1e-2, "lora": 1e-1, "all": 1e-2}


@dataclass(frozen=True, slots=True)
class HealConfig:
    """What learns, from how many tokens, how fast. ``batch`` is the number of windows a process takes at once.

    ``hidden`` and ``next_token`` weigh two further terms of the loss: the relative error of hidden states, and the
    loss on the text itself. ``held_out`` tokens of the text's end are only measured on, ``evaluations`` times.
    """

    tokens: int = option(
        200_000, "Tokens to learn from, as 200000 or 200k; a shorter text is read again.", metavar="N", read=read_count
    )
    train: Train = option(
        "attention",
        "attention: the projections of reduced layers; values: only their singular values; lora: low-rank adapters of "
        "them, merged at the end; all: every weight.",
    )
    stage: Stage = option(
        "both", "local: each layer by itself, quick; global: all together, towards the outputs of the teacher."
    )
    rate: float | None = option(
        None,
        "Learning rate of all together, in units of each weight's root mean square; by default by what learns and by "
        "how much there is to learn.",
        "--lr",
    )
    local_rate: float | None = option(None, "Learning rate of single layers, in the same units.", "--local-lr")
    context: int = option(512, "Tokens in a window.", read=read_window)
    batch: int = option(1, "Windows that one process takes at once.")
    accumulate: int | None = option(
        None, f"Batches that make one step; by default 1, of rounded caches as many as hold {ROUNDED_STEP} tokens."
    )
    temperature: float = option(1.0, "Of the teacher's and the student's probabilities.")
    hidden: float = option(0.0, "Weight of the error of hidden states in the loss.")
    next_token: float = option(0.0, "Weight of the loss on the text itself.")
    held_out: int = 4096
    evaluations: int = option(10, "Times to measure on held-out text; the best is saved.")
    local_tokens: int = 32_768
    precision: Precision = option("auto", "auto: bf16 where the machine computes in it.")
    lean: bool = option(False, "Less memory, more time: gradient checkpointing of every block.", "--lean")
    seed: int = option(0, "For the order of windows.")

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("tokens", "context", "batch", "accumulate", "held_out", "evaluations", "local_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}.")
        rates = {"learning rate": self.speed(FAR), "learning rate of single layers": self.local_speed}
        for name, value in {"temperature": self.temperature, **rates}.items():
            if not value > 0:
                raise InputError(f"The {name} must be more than 0, got {value}.")

    def batches_a_step(self, batch_tokens: float, rounded: bool) -> int:
        """Batches of so many tokens that make one step: as asked for, or by whether a cache is ``rounded``."""
        if self.accumulate is not None:
            return self.accumulate
        return max(1, round(ROUNDED_STEP / batch_tokens)) if rounded else 1

    def speed(self, score: float) -> float:
        """The learning rate of all layers together: as asked for, or by what learns and how much it has to learn."""
        return RATES[self.train] * min(1.0, math.sqrt(max(score, 0.0) / FAR)) if self.rate is None else self.rate

    @property
    def local_speed(self) -> float:
        """The same for layers by themselves."""
        return LOCAL_RATES[self.train] if self.local_rate is None else self.local_rate

    def facts(self) -> dict[str, Any]:
        """All settings, for hashes and cards."""
        return {
            **asdict(self),
            "rate": "by distance" if self.rate is None else self.rate,
            "local_rate": self.local_speed,
        }


def read_curve(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """How the healing of the model in ``folder`` went: stage, tokens learnt from and scores on held-out text."""
    lines = [line for line in read_lines(folder / CURVE) if line.has("scores")]
    curve = [(line.text("stage"), line.integer("tokens", least=0), line.scores("scores")) for line in lines]
    for line, (_, _, scores) in zip(lines, curve, strict=True):
        if list(scores) != list(curve[0][2]):
            raise line.child("scores").error(f"expected {', '.join(curve[0][2])} as before")
    return curve
