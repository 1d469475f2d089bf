"""From a profile and a budget to a plan, with the options of all kinds of reduction. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from headwise.files.errors import InputError
from headwise.planning.depth import Span, fewest, shallower, shallowest
from headwise.planning.menus import ATTENTION, BLOCK, MenuRequest, Menus, build_menus, every_option, worthwhile
from headwise.planning.planner import allocate, first_within, planned
from headwise.planning.slider import slider_tables
from headwise.records.budget import Budget
from headwise.records.plan import Changes, Plan, runs
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
    absorb: bool = False,
    cache: str = "none",
) -> Plan:
    """The plan that stays within ``budget`` at the least predicted loss increase.

    Widths are multiples of ``multiple``; layers in ``protect`` stay whole. ``uniform`` gives all layers one width and
    one list of RoPE pairs and joins no blocks, as stock formats want it; ``merge`` also lets heads be merged,
    ``absorb`` blocks of heads cache latents. ``cache`` says how the KV cache may be rounded: "mixed" gives each
    coordinate bits of its own, "latent" (and "mixed" where decode time is limited) also offers latents of which keys
    are made anew, "whole" these and others in 16 bits a coordinate or none, "int8" and "int4" one width or none,
    "none" leaves it as it is. Where layers are limited beside other things, depth comes first, the others on what is
    left.
    """
    _check(profile, multiple, protect, uniform)
    budget.check(profile.shape)
    if absorb and not any("positions_free" in layer.values for layer in profile.layers):
        raise InputError("This profile does not say what positions are worth: inspect the model with `positions`.")
    decided = () if budget.depth is None else depth_for(profile, budget.depth, protect, joining=not uniform)
    rest = budget.beside_depth
    if cache == "mixed" and budget.timed:
        cache = "latent"  # slow, but then so slow as is allowed
    layers: Sequence[Changes] = decided
    if uniform and rest is not None:
        candidates = [*uniform_layers(profile, multiple), *(uniform_merges(profile, multiple) if merge else ())]
        if decided:
            candidates = [tuple(fate or own for own, fate in zip(each, decided, strict=True)) for each in candidates]
        candidates.sort(key=lambda each: sum(predicted_losses(profile, each)))
        layers = first_within(profile, budget, candidates, f"one width in multiples of {multiple}")
    elif rest is not None:
        menus = menus_for(profile, rest, multiple, protect, cache, merge, absorb, decided)
        layers = allocate(profile, rest, menus, f"widths in multiples of {multiple}", decided)
    facts: dict[str, Any] = {"multiple_of": multiple}
    if protect:
        facts["protect"] = sorted(protect)
    if uniform:
        facts["uniform"] = True
    if merge:
        facts["merge_heads"] = True
    if absorb:
        facts["absorb"] = {"context": profile.settings.get("context", 0)}  # that positions were measured at
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
    absorb: bool = False,
    decided: Sequence[Changes] = (),
) -> Menus:
    """What every part of every layer may become at which costs to ``budget``, of all kinds of reduction.

    Which blocks go or are joined may be ``decided`` already.
    """
    costs = [partial(each.cost, shape=profile.shape) for each in budget.each()]
    request = MenuRequest(profile, costs, multiple, protect, cache, merge, absorb)
    sources = [kind.options for kind in kinds()]
    if not decided:
        return build_menus(request, sources)
    parts = {part: menu for part, menu in every_option(request, sources).items() if part[1] != BLOCK}
    return worthwhile(request, shallower(request, parts, decided))


def depth_for(
    profile: Profile, budget: Budget, protect: Collection[int] = (), *, joining: bool = True
) -> tuple[Changes, ...]:
    """For each layer the changes that leave as many blocks as ``budget`` says: some go, neighbours are joined.

    Without ``joining`` blocks can only go.
    """
    if not any("left_out" in layer.values for layer in profile.layers):
        raise InputError(
            "This profile does not say what each layer is worth, so none can be dropped; inspect it again."
        )
    spans, blocks = depth_spans(profile, budget, protect), len(profile.shape.layers)
    spans = [span for span in spans if joining or span.blocks == 1]
    chosen = shallowest(spans, blocks, budget.limit(profile.shape))
    if chosen is None:
        raise budget.refusal(profile.shape, fewest(spans, blocks), "what may be dropped or joined")
    return tuple(changes for span in chosen for changes in span.changes)


def depth_spans(profile: Profile, budget: Budget, protect: Collection[int] = ()) -> list[Span]:
    """What single blocks, and neighbouring ones together, may become where only their number counts."""
    request = MenuRequest(profile, [partial(budget.cost, shape=profile.shape)], protect=protect)
    menus = build_menus(request, [kind.options for kind in kinds()])
    single = [
        Span(number, 1, option.cost, option.loss, (option.changes(),))
        for (number, part), menu in menus.items()
        for option in menu
        if part == ATTENTION
    ]
    return [*single, *(span for kind in kinds() for span in kind.spans(request))]


def predicted_losses(profile: Profile, layers: Sequence[Changes]) -> list[float]:
    """The predicted loss increase of each layer under these changes."""
    measured = list(zip(profile.shape.layers, profile.layers, layers, strict=True))
    losses = [predicted_loss(layer, measurement.values, changes) for layer, measurement, changes in measured]
    for run in runs(layers):
        joining = [change for change in layers[run[0]] if change.following()]
        for number in run[1:-1]:  # a run of more than two counts as all pairs of neighbours in it
            losses[number] += predicted_loss(measured[number][0], measured[number][1].values, joining)
    return losses


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
