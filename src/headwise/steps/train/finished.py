"""A training that is done: what it was of, beside the model, so that the same command shows its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.files.contents import contents_of
from headwise.files.reading import read_json, read_record
from headwise.files.writing import record_text
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig

KIND, VERSION, NAME = "training", 1, "training.json"


def asked_for(plan: Plan, data: Sequence[Path], tokenizer: str | None, config: TrainConfig) -> str:
    """A hash of all that a training comes from, as the person asks for it."""
    contents = [sorted(contents_of(path).values()) for path in data]
    words = None if tokenizer is None else sorted(contents_of(Path(tokenizer).expanduser()).items()) or tokenizer
    asked = json.dumps([plan.text(), contents, words, config.facts()])
    return hashlib.sha256(asked.encode()).hexdigest()


def noted(asked: str, facts: dict[str, Any]) -> str:
    """The file that says so."""
    return record_text(KIND, VERSION, {"asked": asked, "facts": facts})


def finished(output: Path, asked: str) -> dict[str, Any] | None:
    """The report of a training in ``output`` that came from the same; None where there is none."""
    if not (output / NAME).is_file():
        return None
    record = read_record(output / NAME, KIND, VERSION)
    if record.text("asked") != asked:
        return None
    (architecture,) = read_json(output / "config.json")["architectures"]
    notes = ["This training was finished before, nothing was done; for another one give another name."]
    return {"class": architecture, **record.mapping("facts"), "notes": notes, "finished_before": True}
