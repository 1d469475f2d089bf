"""From a profile and a budget to a plan, with the options of all kinds of reduction. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from headwise.files.errors import InputError
from headwise.planning.menus import MenuRequest, Menus, build_menus
from headwise.planning.planner import allocate, first_within, planned
from headwise.planning.slider import slider_tables
from headwise.records.budget import Budget
from headwise.records.plan import Changes, Plan
from headwise.records.profile import Profile
from headwise.reduction.kinds import kinds, predicted_loss
from headwise.reduction.sharing.uniform import uniform_merges
from headwise.reduction.widths.uniform import uniform_layers


def plan_for(
    profile: Profile,
    budget: Budget,
    *,
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
    merge: bool = False,
    cache: str = "none",
) -> Plan:
    """The plan that stays within ``budget`` at the least predicted loss increase.

    Widths are multiples of ``multiple``; layers in ``protect`` stay whole. ``uniform`` gives all layers one width and
    one list of RoPE pairs, as stock formats want it; ``merge`` also lets heads be merged. ``cache`` says how the KV
    cache may be rounded: "mixed" gives each coordinate bits of its own, "latent" (and "mixed" where decode time is
    limited) also offers latents of which keys are made anew, "whole" these and others in 16 bits a coordinate or none,
    "int8" and "int4" one width or none, "none" leaves it as it is.
    """
    _check(profile, multiple, protect, uniform)
    budget.check(profile.shape)
    if budget.kind == "layers" and not any("left_out" in layer.values for layer in profile.layers):
        raise InputError(
            "This profile does not say what each layer is worth, so none can be dropped; inspect it again."
        )
    if cache == "mixed" and budget.timed:
        cache = "latent"  # slow, but then so slow as is allowed
    layers: Sequence[Changes]
    if uniform:
        candidates = [*uniform_layers(profile, multiple), *(uniform_merges(profile, multiple) if merge else ())]
        candidates.sort(key=lambda each: sum(predicted_losses(profile, each)))
        layers = first_within(profile, budget, candidates, f"one width in multiples of {multiple}")
    else:
        menus = menus_for(profile, budget, multiple, protect, cache, merge)
        layers = allocate(profile, budget, menus, f"widths in multiples of {multiple}")
    facts: dict[str, Any] = {"multiple_of": multiple}
    if protect:
        facts["protect"] = sorted(protect)
    if uniform:
        facts["uniform"] = True
    if merge:
        facts["merge_heads"] = True
    if any(change.code_bits(layer) for layer, changes in zip(profile.shape.layers, layers) for change in changes):
        facts["cache"] = cache
    return planned(profile, budget, layers, predicted_losses(profile, layers), **facts)


def menus_for(
    profile: Profile,
    budget: Budget,
    multiple: int = 8,
    protect: Collection[int] = (),
    cache: str = "none",
    merge: bool = False,
) -> Menus:
    """What every part of every layer may become at which costs to ``budget``, of all kinds of reduction."""
    costs = [partial(each.cost, shape=profile.shape) for each in budget.each()]
    request = MenuRequest(profile, costs, multiple, protect, cache, merge)
    return build_menus(request, [kind.options for kind in kinds()])


def predicted_losses(profile: Profile, layers: Sequence[Changes]) -> list[float]:
    """The predicted loss increase of each layer under these changes."""
    measured = zip(profile.shape.layers, profile.layers, layers, strict=True)
    return [predicted_loss(layer, measurement.values, changes) for layer, measurement, changes in measured]


def slider(profile: Profile) -> dict[str, Any]:
    """What the slider of the page of ``profile`` moves over."""
    return slider_tables(profile, lambda budget, cache: menus_for(profile, budget, cache=cache))


def _check(profile: Profile, multiple: int, protect: Collection[int], uniform: bool) -> None:
    if multiple < 1:
        raise InputError(f"Widths cannot be multiples of {multiple}.")
    last = len(profile.shape.layers) - 1
    unknown = sorted(layer for layer in protect if not 0 <= layer <= last)
    if unknown:
        raise InputError(f"There is no layer {unknown[0]} to protect: the model has layers 0 to {last}.")
    if protect and uniform:
        raise InputError("A uniform plan gives all layers one width, so none can be protected: leave out one of both.")
