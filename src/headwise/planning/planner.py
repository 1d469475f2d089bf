"""From menus and a budget to a plan, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.files.errors import BudgetError, InputError
from headwise.planning.expectation import checks_of, expected, expected_agreement
from headwise.planning.knapsack import Option, choose
from headwise.planning.menus import Menus
from headwise.planning.several import choose_within
from headwise.records.budget import Budget
from headwise.records.cost import cost_of
from headwise.records.plan import Changes, Plan, in_order
from headwise.records.profile import Profile

NOTHING = (
    "This model has nothing to plan: its attention was removed or is protected, or it is latent (MLA), of which only "
    "the cache can be reduced, by rounding it (keep_kv, with any cache but none)."
)
LATENT = "Attention is latent (MLA): its cache is rounded, its heads and widths stay as they are."
CONFLICTING = "No plan was found that keeps all of these budgets at once with {}, though each of them can be."


def allocate(
    profile: Profile, budget: Budget, menus: Menus, terms: str, decided: Sequence[Changes] = ()
) -> tuple[Changes, ...]:
    """The changes of each layer that keep to ``budget`` at the least predicted loss, one option of each menu.

    ``terms`` say in an error what the options had to keep to. Changes that are ``decided`` stand already; ``menus`` are
    those of the model that they make.
    """
    shape, options = profile.shape, list(menus.values())
    now = shape.planned(Plan.make(shape, decided)) if decided else shape
    fixed, limits, left = [], [], False
    for place, each in enumerate(budget.each()):
        costs = [[_costs(option)[place] for option in menu] for menu in options]
        limit, full = each.limit(shape), each.measure(now)
        left |= full > limit
        fixed.append(full - sum(menu[0] for menu in costs))
        if (feasible := sum(map(min, costs)) + fixed[-1]) > limit and not _nothing_in(options):
            raise each.refusal(shape, feasible, terms)
        limits.append(limit - fixed[-1])
    if left and _nothing_in(options):
        raise InputError(NOTHING)
    chosen = choose(options, limits[0]) if len(limits) == 1 else choose_within(options, limits)
    if chosen is None:
        raise BudgetError(CONFLICTING.format(terms))
    changes: list[list[Any]] = [list(each) for each in decided or [()] * len(shape.layers)]
    for (layer, _), option in zip(menus, chosen, strict=True):
        for place, own in enumerate((option.changes, *option.behind)):
            changes[layer + place] += own()
    return tuple(in_order(each) for each in changes)


def _nothing_in(menus: Iterable[Sequence[Option]]) -> bool:
    return all(len(menu) == 1 for menu in menus)


def _costs(option: Option) -> tuple[int, ...]:
    return option.cost, *option.also


def first_within(
    profile: Profile, budget: Budget, candidates: Iterable[Sequence[Changes]], terms: str
) -> Sequence[Changes]:
    """The first of ``candidates``, changes of all layers, that keeps to ``budget``."""
    shape, costs = profile.shape, []
    limits = [(each, each.limit(shape)) for each in budget.each()]
    for layers in candidates:
        after = shape.planned(Plan.make(shape, layers))
        costs.append([each.measure(after) for each, _ in limits])
        if all(cost <= limit for cost, (_, limit) in zip(costs[-1], limits, strict=True)):
            return layers
    for place, (each, limit) in enumerate(limits):
        feasible = min((row[place] for row in costs), default=0)
        if feasible > limit or not costs:
            raise each.refusal(shape, feasible, terms)
    raise BudgetError(CONFLICTING.format(terms))


def planned(profile: Profile, budget: Budget, layers: Sequence[Changes], losses: Sequence[float], **facts: Any) -> Plan:
    """The plan that makes these changes, with ``losses`` as the predicted loss increase of each layer.

    ``facts`` are put down beside the budget.
    """
    shape = profile.shape
    after = shape.planned(Plan.make(shape, layers))
    for each in budget.each():
        spent, limit = each.measure(after), each.limit(shape)
        if spent > limit:
            raise RuntimeError(f"The plan costs {spent} of {limit}: a mistake in headwise, please report it.")
    costs = [cost_of(each, budget.tokens(shape), budget.batch, budget.dtype) for each in (shape, after)]
    loss = sum(losses)
    rounded = any(layer.packed is not None for layer in after.layers)
    checks = [] if budget.depth else checks_of(profile, rounded)  # none of them drops a block
    predicted = {
        "loss_increase": loss,
        "by_layer": list(losses),
        "expected": expected(checks, loss),
        "agreement": expected_agreement(checks, loss),
        "text": profile.text.get("name", ""),
        "notes": [*_few_samples(profile, layers), *([LATENT] if any(each.latent for each in shape.layers) else [])],
        "kept": budget.measure(after) / budget.measure(shape),
        "also": {each.kind: each.measure(after) / each.measure(shape) for each in budget.also},
        "kv_bytes_per_token": [cost.kv_bytes_per_token for cost in costs],
        "attention_parameters": [cost.attention_parameters for cost in costs],
    }
    asked_for: Mapping[str, Any] = {**budget.facts(shape), **facts}
    return Plan.make(shape, layers, budget=asked_for, predicted=predicted, fingerprint=profile.fingerprint)


def _few_samples(profile: Profile, layers: Sequence[Changes]) -> list[str]:
    """What a person should know of changed layers that were measured on too few tokens; far too few are refused."""
    width, few = profile.shape.width, []
    for index, (layer, measured, changes) in enumerate(zip(profile.shape.layers, profile.layers, layers, strict=True)):
        if not measured.samples or not changes:
            continue
        widest = max(layer.cached.qk_dim, layer.cached.v_dim)
        if measured.samples < widest:
            raise InputError(
                f"Layer {index} was measured on {measured.samples:,} tokens, fewer than a head of it is wide "
                f"({widest}): what it could do without is not known. Inspect the model on more."
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
