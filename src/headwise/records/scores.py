"""Scores of models side by side: quality, size, cache bytes and speed, against the first model (the baseline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from headwise.files.reading import Reader, read_record
from headwise.files.writing import record_text, write_record
from headwise.records.rendering import Shown
from headwise.records.skills import SkillScores, TaskScores, read_skill, read_task

KIND = "scores"
VERSION = 2
OPTIONAL = (
    "loss",
    "loss_error",
    "perplexity",
    "loss_increase",
    "loss_increase_error",
    "kl",
    "kl_error",
    "kl_p99",
    "same_top",
    "agreement",
    "agreement_p5",
    "accuracy",
    "cache_bytes_per_token",
)
MEASURED = ("loss", "loss_error", "loss_increase", "loss_increase_error", "kl", "kl_error")


@dataclass(frozen=True, slots=True)
class Rate:
    """Times the first model's speed: median, lowest and highest round; and tokens per second, by the first's median.

    Rounds differ more than models do: a speed of each model by itself would contradict the ratio.
    """

    tokens_per_second: float
    ratio: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, tokens: int, seconds: list[float], first: list[float]) -> Rate:
        """The rate of a model that took ``seconds`` for ``tokens`` in each round, the first model ``first``."""
        ratios = [theirs / mine for mine, theirs in zip(seconds, first, strict=True)]
        return cls(tokens / median(first) * median(ratios), median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True, slots=True)
class Speed:
    """Prefill speed over ``context`` tokens, and decode speed of the last of them (not of encoders)."""

    context: int
    prefill: Rate
    decode: Rate | None = None


@dataclass(frozen=True, slots=True)
class PartScores:
    """Scores of a model on a part of the tokens: one kind of text, or a stretch of positions up to ``last``.

    Each with one standard error of it, over windows.
    """

    name: str
    tokens: int
    loss: float | None = None
    kl: float | None = None
    loss_error: float | None = None
    loss_increase: float | None = None
    loss_increase_error: float | None = None
    kl_error: float | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class ModelScores:
    """One model. What does not apply to it, or was not measured, is None; `docs/evaluate.md` defines each field.

    ``loss_increase``, ``kl``, ``kl_p99``, ``same_top`` and the agreements compare with the first model, which has none
    itself. Where there are several kinds of text, all of these are of the first, and ``parts`` has each of them. What
    ends in ``_error`` is one standard error, over windows.
    """

    source: str
    kind: str
    dtype: str
    parameters: int
    attention_parameters: int
    loss: float | None = None
    loss_error: float | None = None
    perplexity: float | None = None
    loss_increase: float | None = None
    loss_increase_error: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_p99: float | None = None
    same_top: float | None = None
    agreement: float | None = None
    agreement_p5: float | None = None
    accuracy: float | None = None
    cache_bytes_per_token: float | None = None
    speed: tuple[Speed, ...] = ()
    parts: tuple[PartScores, ...] = ()
    skills: tuple[SkillScores, ...] = ()
    tasks: tuple[TaskScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores(Shown):
    """Models side by side, the text and settings they were measured with, and notes for the user."""

    models: tuple[ModelScores, ...]
    text: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def json(self) -> str:
        """These scores as JSON."""
        return record_text(KIND, VERSION, asdict(self))

    def save(self, path: Path | str) -> None:
        """Write these scores as JSON, whole or not at all."""
        write_record(Path(path), KIND, VERSION, asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> Scores:
        """Read scores; a damaged or foreign file raises an `InputError` that names what is wrong."""
        reader = read_record(Path(path), KIND, VERSION)
        reader.only("headwise", "version", *(item.name for item in fields(cls)))
        models = tuple(_read_model(row) for row in reader.rows("models"))
        if not models or len({tuple(speed.context for speed in model.speed) for model in models}) > 1:
            raise reader.child("models").error("expected models that were timed at the same lengths")
        _check_facts(reader)
        return cls(
            models=models,
            text=reader.mapping("text"),
            settings=reader.mapping("settings"),
            versions=reader.mapping("versions"),
            notes=reader.texts("notes"),
        )


def _check_facts(reader: Reader) -> None:
    """Raise where the text or the settings of the measurement are incomplete."""
    if reader.mapping("text"):
        text = reader.child("text")
        text.text("name")
        for name in ("tokens", *(["context"] if text.has("context") else [])):
            text.integer(name, least=0)
    if reader.mapping("settings"):
        settings = reader.child("settings")
        for name in ("precision", "device"):
            settings.text(name)
        for name in ("threads", "rounds"):
            settings.integer(name, least=1)


def _read_model(row: Reader) -> ModelScores:
    row.only(*(item.name for item in fields(ModelScores)))
    return ModelScores(
        source=row.text("source"),
        kind=row.text("kind"),
        dtype=row.text("dtype"),
        parameters=row.integer("parameters", least=0),
        attention_parameters=row.integer("attention_parameters", least=0),
        speed=tuple(_read_speed(speed) for speed in row.rows("speed")),
        parts=tuple(_read_part(part) for part in row.rows("parts")) if row.has("parts") else (),
        skills=tuple(read_skill(skill) for skill in row.rows("skills")) if row.has("skills") else (),
        tasks=tuple(read_task(task) for task in row.rows("tasks")) if row.has("tasks") else (),
        **{name: row.number(name) for name in OPTIONAL if row.has(name)},
    )


def _read_part(row: Reader) -> PartScores:
    row.only(*(item.name for item in fields(PartScores)))
    scores = {name: row.number(name) for name in MEASURED if row.has(name)}
    last = row.integer("last", least=1) if row.has("last") else None
    return PartScores(row.text("name"), row.integer("tokens"), **scores, last=last)


def _read_speed(row: Reader) -> Speed:
    row.only(*(item.name for item in fields(Speed)))
    decode = _read_rate(row.child("decode")) if row.has("decode") else None
    return Speed(row.integer("context"), _read_rate(row.child("prefill")), decode)


def _read_rate(row: Reader) -> Rate:
    row.only(*(item.name for item in fields(Rate)))
    return Rate(*(row.number(item.name, least=0) for item in fields(Rate)))
