"""How a model in memory was made: its plan, where its tokenizer files are, what belongs into its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import located
from headwise.files.errors import InputError
from headwise.records.plan import Plan
from headwise.runtime.cache import CacheSpec

PLAN = "plan.json"
REMEMBERED = "_headwise_origin"


@dataclass(frozen=True, slots=True)
class Origin:
    """``source`` is the model (folder or Hub id) whose tokenizer or processor files go along, "" where there is none.

    ``facts`` are for the card (method and what was refitted, or how it was healed or trained), ``files`` texts to lay
    beside. ``tokenizer`` is one in memory, which goes along instead of files, ``codes`` say how its cache is packed.
    """

    plan: Plan
    source: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None
    codes: CacheSpec | None = None


def remember(model: PreTrainedModel, origin: Origin) -> PreTrainedModel:
    """``model`` itself, which from now on knows how it was made."""
    model.__dict__[REMEMBERED] = origin
    return model


def origin_of(model: PreTrainedModel) -> Origin | None:
    """How ``model`` was made: what it remembers, else what its folder says; None where headwise did not make it."""
    known = model.__dict__.get(REMEMBERED)
    if known is not None:
        return known
    folder = Path(model.name_or_path or "").expanduser()
    if not model.name_or_path or not (folder / PLAN).is_file():
        return None
    return Origin(Plan.load(folder / PLAN), located(model.name_or_path))


def made_by_headwise(model: PreTrainedModel) -> Origin:
    """How ``model`` was made; an `InputError` where headwise did not make it."""
    origin = origin_of(model)
    if origin is None:
        raise InputError(
            f"This {type(model).__name__} was not made by headwise: it neither comes from compress, heal or train nor "
            f"was it opened from a folder with a {PLAN}."
        )
    return origin


def plan_of(model: PreTrainedModel) -> Plan:
    """The plan by which ``model`` was reduced or built, in memory or in the folder it was opened from.

    >>> small = hw.compress(model, plan, profile)
    >>> hw.shape_of(model).planned(hw.plan_of(small)) == hw.shape_of(small)
    True
    """
    return made_by_headwise(model).plan


def source_of(model: PreTrainedModel) -> str:
    """The folder or Hub id that ``model`` was opened from, or "" where nothing is there any more."""
    name = model.name_or_path
    if not name or Path(name).expanduser().is_dir():
        return located(name) if name else ""
    is_id = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    return name if is_id else ""
