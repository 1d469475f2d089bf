"""Results of several shapes trained on the same data, at equal parameters, equal tokens and equal wall-clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from headwise.files.reading import Reader
from headwise.files.writing import write_record

KIND, VERSION = "comparison", 1
EQUAL = 0.02  # parameters may differ by so much of the first shape's
Reading = Literal["parameters", "tokens", "time"]
READINGS: dict[Reading, str] = {
    "parameters": "equal parameters",
    "tokens": "equal tokens",
    "time": "equal wall-clock",
}
# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom; with still more of them the last is a bit too wide.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Contender:
    """A shape, its training speed, and the tokens it trains on in the time the first shape needs for its own."""

    name: str
    parameters: int
    tokens_per_second: float
    tokens_in_time: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One training: ``loss`` on held-out data at its end, ``best`` on the way, ``curve`` of tokens and loss."""

    shape: str
    seed: int
    reading: Literal["tokens", "time"]
    tokens: int
    loss: float
    best: float
    curve: tuple[tuple[int, float], ...]

    @classmethod
    def read(cls, row: Reader) -> Trial:
        """A training out of a JSON file."""
        curve = tuple(_read_point(point) for point in row.rows("curve"))
        trial = cls(
            row.text("shape"),
            row.integer("seed"),
            row.choice("reading", ("tokens", "time")),
            row.integer("tokens", least=1),
            row.number("loss"),
            row.number("best"),
            curve,
        )
        if not curve or curve[-1] != (trial.tokens, trial.loss):
            raise row.child("curve").error(f"expected points up to {trial.tokens:,} tokens and a loss of {trial.loss}")
        return trial


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses of a shape over seeds: mean and standard deviation; paired by seed, the difference to the first shape.

    ``error`` is the standard error of that difference, ``margin`` half its 95 % interval; one seed gives none.
    """

    mean: float
    spread: float | None
    difference: float
    error: float | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Shapes in the order they were given, the first being the baseline, and all trials."""

    contenders: tuple[Contender, ...]
    trials: tuple[Trial, ...]
    tokens: int
    seeds: tuple[int, ...]
    data: str
    settings: Mapping[str, Any]

    def size(self, name: str) -> float:
        """Parameters of a shape over those of the first."""
        contender = next(each for each in self.contenders if each.name == name)
        return contender.parameters / self.contenders[0].parameters

    def names(self, reading: Reading) -> list[str]:
        """The shapes that a reading compares: of equal parameters, or all."""
        every = [each.name for each in self.contenders]
        return [name for name in every if reading != "parameters" or abs(self.size(name) - 1) <= EQUAL]

    def losses(self, name: str, reading: Reading) -> dict[int, float]:
        """Loss by seed."""
        kind = "time" if reading == "time" else "tokens"
        return {trial.seed: trial.loss for trial in self.trials if (trial.shape, trial.reading) == (name, kind)}

    def outcome(self, name: str, reading: Reading) -> Outcome:
        """The outcome of a shape in one reading."""
        own, first = self.losses(name, reading), self.losses(self.contenders[0].name, reading)
        differences = [loss - first[seed] for seed, loss in own.items()]
        several = len(differences) > 1
        error = stdev(differences) / len(differences) ** 0.5 if several else None
        return Outcome(
            fmean(own.values()),
            stdev(own.values()) if several else None,
            fmean(differences),
            error,
            None if error is None else error * QUANTILES[min(len(differences) - 1, len(QUANTILES)) - 1],
        )

    def verdict(self, reading: Reading) -> str:
        """One sentence: which shapes are better or worse than the first, and which do not differ significantly."""
        first, *others = self.names(reading)
        if not others:
            return f"No other shape has as many parameters as {first}, within {EQUAL:.0%}."
        outcomes = "; ".join(f"{name} {_against(self.outcome(name, reading))}" for name in others)
        several = (
            f"{len(self.seeds)} seeds, 95 % intervals" if len(self.seeds) > 1 else "one seed says nothing of chance"
        )
        return f"Against {first}: {outcomes} ({several})."

    def body(self) -> dict[str, Any]:
        """All of it as plain data."""
        readings = {
            reading: {
                "outcomes": {name: asdict(self.outcome(name, reading)) for name in self.names(reading)},
                "verdict": self.verdict(reading),
            }
            for reading in READINGS
        }
        return {**asdict(self), "readings": readings}

    def save(self, path: Path) -> None:
        """Write all of it as JSON, whole or not at all."""
        write_record(path, KIND, VERSION, self.body())


def _read_point(row: Reader) -> tuple[int, float]:
    row.nested([2])
    tokens, loss = row.items()
    return tokens.as_integer(least=1), loss.as_number()


def _against(outcome: Outcome) -> str:
    size = f"{abs(outcome.difference):.4f}"
    if outcome.margin is None:
        return f"{'lower' if outcome.difference < 0 else 'higher'} by {size} nats"
    known = f"{size} nats +- {outcome.margin:.4f}"
    if abs(outcome.difference) <= outcome.margin:
        return f"not told apart ({'-' if outcome.difference < 0 else '+'}{known})"
    return f"{'better' if outcome.difference < 0 else 'worse'} by {known}"
