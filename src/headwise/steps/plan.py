"""From a profile and a budget to what every layer keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from headwise.files.errors import InputError
from headwise.records.budget import Budget
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.reduction.plans import plan_for

DIGITS = 5  # of the number of a layer


def make_plan(
    source: Path,
    output: Path | None,
    budget: Budget,
    *,
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
) -> tuple[Plan, Profile]:
    """The plan that answers ``budget`` at the least predicted loss increase, and its profile.

    ``source`` is a profile or the folder of one. The plan is written to ``output``, unless that is None. For the rest
    see `headwise.reduction.plans.plan_for`.
    """
    file = source / "profile.json" if source.is_dir() else source
    profile = Profile.load(file)
    decided = plan_for(profile, budget, multiple=multiple, protect=protect, uniform=uniform)
    plan = replace(decided, profile=str(file.parent.resolve()))
    if output is not None:
        plan.save(output)
    return plan, profile


def read_budget(
    keep_kv: float | None = None,
    keep_attention_params: float | None = None,
    kv_bytes_per_token: int | None = None,
    fit: str | None = None,
    context: int | None = None,
    dtype: str = "bf16",
    max_damage: str | None = None,
) -> Budget:
    """The one budget that is given."""
    given = (keep_kv, keep_attention_params, kv_bytes_per_token, fit, max_damage)
    if sum(value is not None for value in given) != 1:
        raise InputError(
            "Give one budget: --keep-kv, --keep-attention-params, --kv-bytes-per-token, --fit or --max-damage."
        )
    if fit is not None and context is not None:
        raise InputError('--fit names its own context, as in "8GB at 32k x 4": leave out --context.')
    if keep_kv is not None:
        return Budget("keep_kv", keep_kv, context, dtype=dtype)
    if keep_attention_params is not None:
        return Budget("keep_attention_params", keep_attention_params, context, dtype=dtype)
    if kv_bytes_per_token is not None:
        return Budget("kv_bytes_per_token", kv_bytes_per_token, context, dtype=dtype)
    return Budget.fitting(fit or "", dtype)


def read_layers(text: str) -> frozenset[int]:
    """The layers that ``text`` like "0,1,28-29" names."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(
                f'Layers are numbers and ranges with commas between them, as in "0,1,28-29", got {text!r}.'
            )
        if max(len(first), len(last)) > DIGITS:
            raise InputError(f"No model has as many layers as {part.strip()!r} names.")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
