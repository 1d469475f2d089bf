"""A request for a new model, and the candidate shapes that answer it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from headwise.files.errors import InputError
from headwise.records.blueprint import Images, Text, builds_of
from headwise.records.cost import Cost, cost_of
from headwise.records.plan import Plan
from headwise.records.shape import ModelShape

SHORTEST = 8
MOST = 10**12
DTYPE = "bf16"
MEASURED, FORMULA_ONLY = "measured", "formula only"


@dataclass(frozen=True, slots=True)
class Request:
    """The costs a new model may have, and what it reads.

    ``lags`` are the strengths with which early layers gather the last tokens, the first for the token just before;
    ``intrinsic_dim`` counts the independent look-ups of the task, if anybody knows them.
    """

    family: str
    parameters: int
    reads: Text | Images
    kv_bytes_per_token: int | None = None
    lags: tuple[float, ...] = (1.0, 0.5, 0.25)
    intrinsic_dim: int | None = None

    def __post_init__(self) -> None:
        builds_of(self.family, self.reads)
        if self.parameters > MOST:
            raise InputError(f"{self.parameters:,} parameters are more than headwise designs for, {MOST:,}.")
        if isinstance(self.reads, Images) and self.kv_bytes_per_token is not None:
            raise InputError("A vit has no KV cache: leave out `kv_bytes_per_token`.")
        if self.reads.tokens < SHORTEST:
            raise InputError(f"{self.reads.tokens} tokens are too few to say anything about; {SHORTEST} are the least.")
        if not any(self.lags) or not all(0 <= lag < math.inf for lag in self.lags):
            raise InputError(f"Strengths of lags are numbers from 0 on, not all 0; got {self.lags}.")
        if self.intrinsic_dim is not None and self.intrinsic_dim < 1:
            raise InputError(f"A task has an intrinsic dimension of at least 1, got {self.intrinsic_dim}.")

    def body(self) -> dict[str, Any]:
        """This request as plain data: the budget that a plan answers."""
        body = {**asdict(self), "dtype": DTYPE}
        del body["family"], body["reads"]
        return {**body, "context": self.reads.tokens, "lags": list(self.lags)}


class Apart(NamedTuple):
    """Nats of held-out loss against the usual shape, and half the 95 % interval of that difference."""

    difference: float
    margin: float

    @property
    def better(self) -> bool:
        """Whether the whole interval is below zero."""
        return self.difference + self.margin < 0

    def __str__(self) -> str:
        known = f"{self.difference:+.3f} +- {self.margin:.3f} nats"
        if abs(self.difference) <= self.margin:
            return f"not told apart ({known})"
        return f"{'better' if self.better else 'worse'} ({known})"


@dataclass(frozen=True, slots=True)
class Measured:
    """Held-out loss of a kind of shape against the usual one, both trained, at equal tokens and equal wall-clock.

    ``file`` has the figures, ``where`` says what was trained. The usual one differs from itself by zero.
    """

    file: str
    where: str
    tokens: Apart
    time: Apart

    def __str__(self) -> str:
        if not self.time.margin:
            return "what the others were held against"
        return f"at equal tokens {self.tokens}, at equal wall-clock {self.time}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One shape, why it might be a good one in one sentence, and the losses where its kind was trained."""

    name: str
    why: str
    plan: Plan
    measured: Measured | None = None

    @property
    def evidence(self) -> str:
        """Whether its kind was trained, or only formulas speak for it."""
        return FORMULA_ONLY if self.measured is None else MEASURED

    @property
    def shape(self) -> ModelShape:
        """The model it would be."""
        return self.plan.shape_to_build()

    @property
    def cost(self) -> Cost:
        """The cost of that model at its longest input."""
        return cost_of(self.shape, self.shape.max_tokens, dtype=DTYPE)


@dataclass(frozen=True, slots=True)
class Design:
    """Candidates for one request, the usual shape first, and which of them is recommended ``because`` of what.

    ``left_out`` says for each idea that is not among them why.
    """

    request: Request
    candidates: tuple[Candidate, ...]
    recommended: str
    because: str
    left_out: Mapping[str, str]

    def choose(self, name: str | None = None) -> Candidate:
        """The candidate called ``name``, by default the recommended one."""
        name = name or self.recommended
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        names = ", ".join(candidate.name for candidate in self.candidates)
        raise InputError(f"There is no candidate {name!r} here; choose one of {names}.")

    def json(self) -> str:
        """All of it as JSON, every plan as it would be written."""
        body = {
            "recommended": self.recommended,
            "because": self.because,
            "candidates": [_candidate_body(candidate) for candidate in self.candidates],
            "left_out": dict(self.left_out),
        }
        return json.dumps(body, indent=1)


def _candidate_body(candidate: Candidate) -> dict[str, Any]:
    measured = candidate.measured
    body: dict[str, Any] = {"name": candidate.name, "why": candidate.why, "evidence": candidate.evidence}
    if measured is not None:
        nats = {"equal tokens": measured.tokens._asdict(), "equal wall-clock": measured.time._asdict()}
        body["measured"] = {"file": measured.file, "where": measured.where, "nats": nats}
    return {**body, "plan": json.loads(candidate.plan.text())}
