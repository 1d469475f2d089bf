"""Records of the paper experiments: claims, outcomes of single settings, verdicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwise.files.errors import InputError
from headwise.files.reading import Reader, read_record
from headwise.files.writing import write_record

OUTCOME, FINDINGS, VERSION = "paper-outcome", "paper-findings", 1
HELD, CONDITIONAL, FAILED = "held", "held under conditions", "not held"
UNREACHED, OPEN = "out of reach here", "not run yet"
STATUSES = (HELD, CONDITIONAL, FAILED, UNREACHED, OPEN)
DIGITS = 16
STORED = {"measured": "found"}  # fields that have another name in files


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper and its figure there; ``experiment`` decides it here, or ``reason`` says why none does."""

    name: str
    says: str
    figure: str
    experiment: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The status of a claim, the figure that decides it, and the conditions."""

    claim: str
    status: str
    figure: str
    because: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart; ``paper`` if its numbers are the paper's own."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    paper: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one axis."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished setting of an experiment: settings, measured values, seconds, versions.

    ``recipe`` is the version of the experiment: outcomes of another one do not count.
    """

    paper: str
    experiment: str
    recipe: int
    settings: Mapping[str, Any]
    measured: Mapping[str, Any]
    seconds: float
    versions: Mapping[str, str]

    def save(self, folder: Path) -> None:
        """Write it under ``folder``."""
        path = outcome_path(folder, self.paper, self.experiment, self.recipe, self.settings)
        body = {STORED.get(name, name): value for name, value in asdict(self).items()}
        write_record(path, OUTCOME, VERSION, body, indent=None)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read it back."""
        record = read_record(path, OUTCOME, VERSION)
        return cls(
            record.text("paper"),
            record.text("experiment"),
            record.integer("recipe"),
            record.mapping("settings"),
            record.mapping(STORED["measured"]),
            record.number("seconds", least=0),
            record.mapping("versions"),
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """The verdicts and charts of one experiment, from all its settings."""

    paper: str
    experiment: str
    size: str
    settings: int
    seeds: int
    seconds: float
    verdicts: tuple[Verdict, ...]
    charts: tuple[Chart, ...]

    def save(self, folder: Path) -> None:
        """Write it under ``folder``."""
        path = folder / self.paper / f"{self.experiment}.{self.size}.json"
        write_record(path, FINDINGS, VERSION, asdict(self))

    @classmethod
    def load(cls, folder: Path, paper: str, experiment: str, sizes: Sequence[str]) -> Findings | None:
        """Those of the first of ``sizes`` that was run, if any."""
        for size in sizes:
            path = folder / paper / f"{experiment}.{size}.json"
            if path.is_file():
                return cls._read(read_record(path, FINDINGS, VERSION))
        return None

    @classmethod
    def _read(cls, record: Reader) -> Findings:
        return cls(
            record.text("paper"),
            record.text("experiment"),
            record.text("size"),
            record.integer("settings", least=0),
            record.integer("seeds", least=0),
            record.number("seconds", least=0),
            tuple(_verdict(row) for row in record.rows("verdicts")),
            tuple(_chart(row) for row in record.rows("charts")),
        )


def outcome_path(folder: Path, paper: str, experiment: str, recipe: int, settings: Mapping[str, Any]) -> Path:
    """Where the outcome of ``settings`` belongs: the same recipe and settings, the same file."""
    text = json.dumps([paper, experiment, recipe, settings], sort_keys=True)
    return folder / paper / experiment / f"{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}.json"


def _verdict(row: Reader) -> Verdict:
    row.only(*(item.name for item in fields(Verdict)))
    return Verdict(row.text("claim"), row.choice("status", STATUSES), row.text("figure"), row.text("because"))


def _chart(row: Reader) -> Chart:
    row.only(*(item.name for item in fields(Chart)))
    log_x, log_y = row.flag("log_x"), row.flag("log_y")
    lines = tuple(_line(line, log_x) for line in row.rows("lines"))
    return Chart(row.text("title"), row.text("x"), row.text("y"), lines, log_x, log_y)


def _line(row: Reader, log_x: bool) -> Line:
    row.only(*(item.name for item in fields(Line)))
    x, y = (row.child(name).numbers() for name in ("x", "y"))
    if len(x) != len(y):
        raise InputError(f"{row.where}: {len(x)} numbers in x and {len(y)} in y; each point needs both.")
    if log_x and not all(value > 0 for value in x):
        raise row.child("x").error("expected numbers above 0 for a logarithmic axis")
    return Line(row.text("name"), x, y, row.flag("paper"))
