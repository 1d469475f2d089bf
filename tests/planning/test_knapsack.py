"""The knapsack against every possible choice."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.files.errors import InputError
from headwise.planning import knapsack
from headwise.planning.expectation import expected
from headwise.planning.knapsack import Option, choose, frontier, least
from headwise.records.profile import Check

MOST = 20
layers = st.lists(
    st.lists(st.tuples(st.integers(0, MOST), st.floats(0, 1)), max_size=6).map(
        lambda found: frontier([Option(MOST, 0.0), *(Option(*pair) for pair in found)])
    ),
    min_size=1,
    max_size=4,
)


def cost(options):
    return sum(option.cost for option in options)


def loss(options):
    return sum(option.loss for option in options)


def best(menus, limit):
    return min(loss(options) for options in itertools.product(*menus) if cost(options) <= limit)


def largest_step(menus):
    """The most loss between two options: what the last step down a hull may add."""
    return max(options[-1].loss for options in menus)


@given(options=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_the_frontier_has_a_match_for_everything(options):
    options = [Option(*pair) for pair in options]
    kept = frontier(options)
    assert all(any(k.cost <= o.cost and k.loss <= o.loss for k in kept) for o in options)
    assert all(a.cost > b.cost and a.loss <= b.loss for a, b in itertools.pairwise(kept))


@given(menus=layers, share=st.floats(0, 1))
def test_never_over_the_limit_and_never_far_from_the_best(menus, share):
    limit = least(menus) + int(share * (cost(options[0] for options in menus) - least(menus)))
    chosen = choose(menus, limit)
    assert cost(chosen) <= limit
    assert all(option in options for option, options in zip(chosen, menus, strict=True))
    assert loss(chosen) <= best(menus, limit) + largest_step(menus) + 1e-9


def test_mostly_the_best_there_is():
    draw, same, excess = random.Random(0), 0, 0.0
    for _ in range(200):
        menus = [
            frontier([Option(MOST, 0.0)] + [Option(draw.randrange(MOST), draw.random() ** 2) for _ in range(8)])
            for _ in range(4)
        ]
        limit = draw.randint(least(menus), 4 * MOST)
        found, possible = loss(choose(menus, limit)), best(menus, limit)
        same += found <= possible + 1e-9
        excess += found - possible
    assert same >= 190 and excess / 200 < 0.002


def test_nothing_is_cut_without_need():
    menus = [frontier([Option(32, 0.0), Option(24, 0.0), Option(0, 1.0)])] * 3
    assert choose(menus, 96) == [menus[0][0]] * 3
    assert cost(choose(menus, 95)) == 88


def test_a_limit_below_everything_is_refused():
    with pytest.raises(InputError, match="costs 5, which is more than 4"):
        choose([[Option(5, 0.0)]], 4)


def test_a_large_model_needs_few_rounds(monkeypatch):
    """80 layers with 400 options each on their frontiers: each round of exchanges looks at all of them."""
    draw = random.Random(0)
    menus = []
    for _ in range(80):
        falls = sorted((draw.random() for _ in range(400)), reverse=True)
        menus.append([Option(8 * (400 - n), sum(falls[-n:]) if n else 0.0) for n in range(400)])
    rounds, best_moves = [], knapsack._best_moves
    monkeypatch.setattr(knapsack, "_best_moves", lambda *given: (rounds.append(1), best_moves(*given))[1])
    chosen = choose(menus, 80 * 8 * 170)
    assert cost(chosen) <= 80 * 8 * 170 and len(rounds) < 10


def test_what_to_expect_of_a_prediction():
    checks = [Check(0.1, 0.2), Check(0.01, 0.01), Check(1.0, 4.0)]
    assert expected((), 0.1) is None
    assert expected(checks, 0.0) == 0.0
    assert expected(checks, 0.1) == pytest.approx(0.2)
    assert expected(checks, 0.001) == pytest.approx(0.001)
    assert expected(checks, 10.0) == pytest.approx(40.0)
    assert expected(checks, 0.1 * 10**0.5) == pytest.approx(3 * 0.1 * 10**0.5)
    assert expected([Check(0.0, 0.1), Check(0.5, 0.6)], 0.1) == pytest.approx(0.12)
