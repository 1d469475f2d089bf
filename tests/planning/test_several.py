"""Several limits at once, against every possible choice."""

import itertools
import random

from headwise.planning.knapsack import Option
from headwise.planning.several import choose_within

MOST = 30


def menu(chance, costs):
    """An option to stay whole, and some that cost other sums and some loss."""
    whole = Option(MOST, 0.0, tuple, (MOST,) * costs)
    others = (
        Option(chance.randrange(MOST), chance.random(), tuple, tuple(chance.randrange(2 * MOST) for _ in range(costs)))
        for _ in range(6)
    )
    return [whole, *others]


def spent(chosen):
    return [sum(costs) for costs in zip(*((option.cost, *option.also) for option in chosen), strict=True)]


def within(chosen, limits):
    return all(total <= limit for total, limit in zip(spent(chosen), limits, strict=True))


def lost(chosen):
    return sum(option.loss for option in chosen)


def test_all_limits_hold_and_mostly_nothing_better_exists():
    chance, found, near = random.Random(3), 0, 0
    for _ in range(60):
        menus = [menu(chance, 1) for _ in range(4)]
        limits = [round(4 * MOST * chance.uniform(0.4, 0.9)), round(4 * MOST * chance.uniform(0.4, 1.1))]
        possible = [lost(choice) for choice in itertools.product(*menus) if within(choice, limits)]
        chosen = choose_within(menus, limits)
        if chosen is None:
            found += not possible
            near += not possible
            continue
        assert within(chosen, limits)
        found += 1
        near += lost(chosen) <= min(possible) + 0.1
    assert found >= 58
    assert near >= 54


def test_three_limits_are_mostly_kept_to_where_they_can_be():
    chance, missed, possible = random.Random(11), 0, 0
    for _ in range(60):
        menus = [menu(chance, 2) for _ in range(4)]
        limits = [round(4 * MOST * chance.uniform(0.4, 1.1)) for _ in range(3)]
        if any(within(choice, limits) for choice in itertools.product(*menus)):
            chosen = choose_within(menus, limits)
            possible += 1
            missed += chosen is None
            assert chosen is None or within(chosen, limits)
    assert missed <= possible / 20


def test_three_limits_hold():
    chance = random.Random(5)
    menus = [menu(chance, 2) for _ in range(12)]
    whole = spent([options[0] for options in menus])
    limits = [round(0.8 * cost) for cost in whole]
    chosen = choose_within(menus, limits)
    assert within(chosen, limits)
    assert lost(chosen) < sum(max(option.loss for option in options) for options in menus) / 2


def test_a_limit_that_is_none_costs_nothing():
    chance = random.Random(7)
    menus = [menu(chance, 1) for _ in range(8)]
    one = choose_within(menus, [8 * MOST, 10**9])
    assert lost(one) == 0


def test_what_no_choice_keeps_to_is_said():
    chance = random.Random(9)
    menus = [menu(chance, 1) for _ in range(3)]
    assert choose_within(menus, [3 * MOST, -1]) is None
