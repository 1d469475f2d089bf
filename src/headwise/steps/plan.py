"""From a profile and a budget to what every layer keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import cast

from headwise.files.errors import InputError
from headwise.records.budget import Budget, Kind
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.settings import BoundConfig, BudgetConfig, CacheConfig
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
    merge: bool = False,
    absorb: bool = False,
    cache: str = "none",
) -> tuple[Plan, Profile]:
    """The plan that answers ``budget`` at the least predicted loss increase, and its profile.

    ``source`` is a profile or the folder of one. The plan is written to ``output``, unless that is None. For the rest
    see `headwise.reduction.plans.plan_for`.
    """
    file = profile_file(source)
    profile = Profile.load(file)
    decided = plan_for(
        profile,
        budget,
        multiple=multiple,
        protect=protect,
        uniform=uniform,
        merge=merge,
        absorb=absorb,
        cache=cache,
    )
    plan = replace(decided, profile=str(file.parent.resolve()))
    if output is not None:
        plan.save(output)
    return plan, profile


def profile_file(source: Path) -> Path:
    """The profile ``source``, or the one in the folder ``source``."""
    return source / "profile.json" if source.is_dir() else source


def read_budget(budget: BudgetConfig, bound: BoundConfig | None, cache: CacheConfig) -> Budget | None:
    """The budget that is given, with those that hold at once; None where a ``bound`` on the loss is given instead."""
    amounts = {name: value for name, value in asdict(budget).items() if value is not None}
    bounds = [] if bound is None else [value for value in asdict(bound).values() if value is not None]
    if len(bounds) > 1 or bool(bounds) == bool(amounts):
        *most, last = (f"`{each.name}`" for each in fields(BudgetConfig))
        instead = "" if bound is None else f", or one of {', '.join(f'`{each.name}`' for each in fields(BoundConfig))}"
        raise InputError(f"Give a budget: {', '.join(most)} or {last}{instead}.")
    if budget.fit is not None and cache.cache_tokens is not None:
        raise InputError('`fit` names its own tokens in the cache, as in "8GB at 32k x 4": leave out `cache_tokens`.')
    if bounds:
        return None
    fitting = None if budget.fit is None else Budget.fitting(budget.fit, cache.cache_dtype)
    context = cache.cache_tokens if fitting is None else fitting.context
    first, *also = (
        Budget(cast(Kind, kind), cast(float, amount), context, dtype=cache.cache_dtype)
        if kind != "fit" or fitting is None
        else fitting
        for kind, amount in amounts.items()
    )
    return replace(first, also=tuple(also))


def given_budget(budget: BudgetConfig, cache: CacheConfig) -> Budget | None:
    """The budget that is given; None where none is."""
    return None if budget == BudgetConfig() else read_budget(budget, None, cache)


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
