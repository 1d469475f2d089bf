"""Saving a model so that others can open it: written under another name, checked in a fresh process, renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.checkpoints.card import card
from headwise.checkpoints.companions import MODULES, copy_companions
from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.origin import PLAN, Origin, made_by_headwise
from headwise.checkpoints.verify import check_packed, check_saved
from headwise.data.foreign import without_code
from headwise.families.reduced import auto_map, stock_class_of
from headwise.families.sites import base_type
from headwise.files.locks import locking
from headwise.files.reading import read_json
from headwise.files.writing import new_folder, write_text
from headwise.records.plan import Plan
from headwise.runtime import modeling_headwise, reopen
from headwise.runtime.cache import CODES, write_spec


def save(
    model: PreTrainedModel, folder: Path | str, *, tokenizer: Any = None, command: str = "", shard: str = "5GB"
) -> dict[str, Any]:
    """Write a model that compress, heal or train made to ``folder``, after a fresh process has opened it there.

    Returns what that process found. ``tokenizer`` is saved along; without it the tokenizer or processor files of the
    model that this one was made from are copied. ``command`` is named in the card, ``shard`` is the largest file.

    >>> report = hw.save(small, folder / "out", tokenizer=tokenizer)
    >>> report["missing"]
    []
    >>> hw.plan_of(hw.open(folder / "out")) == hw.plan_of(small)
    True
    """
    origin = made_by_headwise(model)
    if tokenizer is not None:
        origin = replace(origin, tokenizer=tokenizer)
    return write_model(model, folder, origin, command=command, shard=shard)


def save_student(
    student: PreTrainedModel,
    folder: Path | str,
    *,
    plan: Plan,
    source: str,
    command: str = "",
    facts: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    shard: str = "5GB",
) -> dict[str, Any]:
    """Write ``student``, which was made as `Origin` says, to ``folder`` as `write_model` does."""
    return write_model(student, folder, Origin(plan, source, facts or {}, files or {}), command=command, shard=shard)


@locking("folder", "save")
def write_model(
    model: PreTrainedModel, folder: Path | str, origin: Origin, *, command: str = "", shard: str = "5GB"
) -> dict[str, Any]:
    """Write ``model`` to ``folder``, prove that a fresh process opens it, and return what that process found.

    "notes" say which files of its origin could not go along. Nothing appears under ``folder`` until all is written and
    checked.
    """
    own_words = origin.tokenizer is not None
    with new_folder(Path(folder)) as temporary:
        model.save_pretrained(temporary, max_shard_size=shard)
        if own_words:
            origin.tokenizer.save_pretrained(temporary)
        keep_own_code(model, temporary)
        reduced = origin.plan.blueprint is None
        notes = copy_companions(origin.source, temporary, pooling=reduced, tokenizer=not own_words)
        origin.plan.save(temporary / PLAN)
        if origin.codes is not None:
            write_spec(temporary / CODES, replace(origin.codes, fingerprint=fingerprint(model)))
        for name, text in origin.files.items():
            write_text(temporary / name, text)
        report = {**check_saved(model, temporary), "notes": notes}
        if origin.codes is not None:
            report |= check_packed(model, temporary / CODES)
        facts = {**report, **origin.facts, "pools": (temporary / MODULES).exists()}
        write_text(temporary / "README.md", card(model, origin.plan, origin.source, command, facts))
    return report


def keep_own_code(model: PreTrainedModel, folder: Path) -> None:
    """Leave no code in ``folder`` but headwise's own files, and those only beside a per-layer model.

    Saving lays a copy of the file that a class was read from beside the model, and keeps what its config named before.
    """
    for path in folder.rglob("*.py"):
        path.unlink()
    for path in folder.glob("*config.json"):
        content = read_json(path)
        cleaned = without_code(content)
        if content.get("model_type") == modeling_headwise.HeadwiseConfig.model_type:
            for own in reopen.OWN_FILES:
                shutil.copyfile(own, folder / own.name)
            cleaned["auto_map"] = auto_map(base_type(model.config), stock_class_of(model))
        if cleaned != content:
            write_text(path, json.dumps(cleaned, indent=2, sort_keys=True) + "\n")
