"""From a profile and a budget to a plan: per layer by auction, or one width for the whole model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwise.files.errors import InputError
from headwise.planning.damage import expected, expected_agreement, plan_damage
from headwise.planning.knapsack import choose, least
from headwise.planning.options import keep, offers_of
from headwise.planning.uniform import uniform_layers
from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.records.plan import LayerPlan, Plan
from headwise.records.profile import Profile


def plan_for(
    profile: Profile, budget: Budget, *, multiple: int = 8, protect: Collection[int] = (), uniform: bool = False
) -> Plan:
    """The plan that stays within ``budget`` at the least predicted damage.

    Widths are multiples of ``multiple``; layers in ``protect`` stay whole. ``uniform`` gives all layers one width and
    one set of RoPE pairs, as stock formats want it.
    """
    _check(profile, multiple, protect, uniform)
    shape = profile.shape
    limit = budget.limit(shape)
    layers = (
        _uniform(profile, budget, limit, multiple) if uniform else _auction(profile, budget, limit, multiple, protect)
    )
    plan = Plan.make(
        shape,
        layers,
        budget={**budget.facts(shape), "multiple_of": multiple}
        | ({"protect": sorted(protect)} if protect else {})
        | ({"uniform": True} if uniform else {}),
        predicted=_predicted(profile, budget, layers),
        fingerprint=profile.fingerprint,
    )
    spent = budget.measure(shape.planned(plan))
    if spent > limit:
        raise RuntimeError(f"The plan costs {spent} of {limit}: a mistake in headwise, please report it.")
    return plan


def _auction(
    profile: Profile, budget: Budget, limit: int, multiple: int, protect: Collection[int]
) -> tuple[LayerPlan, ...]:
    shape = profile.shape
    offers = offers_of(profile, lambda layer: budget.price(layer, shape), multiple, protect)
    if all(len(options) == 1 for options in offers) and budget.measure(shape) > limit:
        raise InputError("This model has nothing to plan: its attention is latent (MLA), was removed, or is protected.")
    fixed = budget.measure(shape) - sum(options[0].price for options in offers)
    if least(offers) + fixed > limit:
        raise budget.refusal(shape, least(offers) + fixed, f"widths in multiples of {multiple}")
    chosen = choose(offers, limit - fixed)
    measured = zip(shape.layers, profile.layers, chosen, strict=True)
    return tuple(keep(layer, found.values, option) for layer, found, option in measured)


def _uniform(profile: Profile, budget: Budget, limit: int, multiple: int) -> tuple[LayerPlan, ...]:
    narrowest = 0
    for layers in uniform_layers(profile, multiple):
        narrowest = budget.measure(profile.shape.planned(Plan.make(profile.shape, layers)))
        if narrowest <= limit:
            return layers
    raise budget.refusal(profile.shape, narrowest, f"one width in multiples of {multiple}")


def _predicted(profile: Profile, budget: Budget, layers: Sequence[LayerPlan]) -> dict[str, object]:
    before, after = profile.shape, profile.shape.planned(Plan.make(profile.shape, tuple(layers)))
    costs = [cost_of(shape, budget.tokens(before), budget.batch, budget.dtype) for shape in (before, after)]
    damage = plan_damage(profile, layers)
    return {
        "damage": damage,
        "expected": expected(profile.checks, damage),
        "agreement": expected_agreement(profile.checks, damage),
        "text": profile.text.get("name", ""),
        "notes": _few_samples(profile, layers),
        "kept": budget.measure(after) / budget.measure(before),
        "kv_bytes_per_token": [cost.kv_bytes_per_token for cost in costs],
        "attention_parameters": [cost.attention_parameters for cost in costs],
    }


def _few_samples(profile: Profile, layers: Sequence[LayerPlan]) -> list[str]:
    """What a person should know of cut layers that were measured on too few tokens; far too few are refused."""
    width, few = profile.shape.width, []
    for index, (layer, measured, change) in enumerate(zip(profile.shape.layers, profile.layers, layers, strict=True)):
        if not measured.samples or change == LayerPlan.full(layer):
            continue
        if measured.samples < max(layer.qk_dim, layer.v_dim):
            raise InputError(
                f"Layer {index} was measured on {measured.samples:,} tokens, fewer than a head of it is wide "
                f"({max(layer.qk_dim, layer.v_dim)}): what it could do without is not known. Inspect the model on more."
            )
        if measured.samples < width:
            few.append((index, measured.samples))
    if not few:
        return []
    shown = ", ".join(str(index) for index, _ in few)
    return [
        f"Layers {shown} were measured on {min(samples for _, samples in few):,} tokens, fewer than the model is wide "
        f"({width:,}): their part of the prediction is a guess. Inspect the model on more."
    ]


def _check(profile: Profile, multiple: int, protect: Collection[int], uniform: bool) -> None:
    if multiple < 1:
        raise InputError(f"Widths cannot be multiples of {multiple}.")
    last = len(profile.shape.layers) - 1
    unknown = sorted(layer for layer in protect if not 0 <= layer <= last)
    if unknown:
        raise InputError(f"There is no layer {unknown[0]} to protect: the model has layers 0 to {last}.")
    if protect and uniform:
        raise InputError("A uniform plan gives all layers one width, so none can be protected: leave out one of both.")
