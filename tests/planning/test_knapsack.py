"""The auction against every possible choice."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.files.errors import InputError
from headwise.planning import knapsack as allocation
from headwise.planning.damage import expected
from headwise.planning.knapsack import Option, choose, frontier, least
from headwise.records.profile import Check

MOST = 20
layers = st.lists(
    st.lists(st.tuples(st.integers(0, MOST), st.floats(0, 1)), max_size=6).map(
        lambda found: frontier([Option(9, 9, 9, MOST, 0.0), *(Option(n, 0, 0, *pair) for n, pair in enumerate(found))])
    ),
    min_size=1,
    max_size=4,
)


def price(options):
    return sum(option.price for option in options)


def damage(options):
    return sum(option.damage for option in options)


def best(offers, limit):
    return min(damage(options) for options in itertools.product(*offers) if price(options) <= limit)


def largest_step(offers):
    """The most damage between two options: what the last step down a hull may add."""
    return max(options[-1].damage for options in offers)


@given(options=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_the_frontier_has_a_match_for_everything(options):
    options = [Option(n, 0, 0, *pair) for n, pair in enumerate(options)]
    kept = frontier(options)
    assert all(any(k.price <= o.price and k.damage <= o.damage for k in kept) for o in options)
    assert all(a.price > b.price and a.damage <= b.damage for a, b in itertools.pairwise(kept))


@given(offers=layers, share=st.floats(0, 1))
def test_never_over_the_limit_and_never_far_from_the_best(offers, share):
    limit = least(offers) + int(share * (price(options[0] for options in offers) - least(offers)))
    chosen = choose(offers, limit)
    assert price(chosen) <= limit
    assert all(option in options for option, options in zip(chosen, offers, strict=True))
    assert damage(chosen) <= best(offers, limit) + largest_step(offers) + 1e-9


def test_mostly_the_best_there_is():
    draw, same, excess = random.Random(0), 0, 0.0
    for _ in range(200):
        offers = [
            frontier(
                [Option(9, 9, 9, MOST, 0.0)]
                + [Option(n, 0, 0, draw.randrange(MOST), draw.random() ** 2) for n in range(8)]
            )
            for _ in range(4)
        ]
        limit = draw.randint(least(offers), 4 * MOST)
        found, possible = damage(choose(offers, limit)), best(offers, limit)
        same += found <= possible + 1e-9
        excess += found - possible
    assert same >= 190 and excess / 200 < 0.002


def test_nothing_is_cut_without_need():
    offers = [frontier([Option(2, 8, 8, 32, 0.0), Option(2, 8, 4, 24, 0.0), Option(0, 0, 0, 0, 1.0)])] * 3
    assert choose(offers, 96) == [offers[0][0]] * 3
    assert price(choose(offers, 95)) == 88


def test_a_limit_below_everything_is_refused():
    with pytest.raises(InputError, match="costs 5, which is more than 4"):
        choose([[Option(1, 1, 1, 5, 0.0)]], 4)


def test_a_large_model_needs_few_rounds(monkeypatch):
    """80 layers with 400 options each on their frontiers: each round of exchanges looks at all of them."""
    draw = random.Random(0)
    offers = []
    for _ in range(80):
        falls = sorted((draw.random() for _ in range(400)), reverse=True)
        offers.append([Option(n, 0, 0, 8 * (400 - n), sum(falls[-n:]) if n else 0.0) for n in range(400)])
    rounds, best_moves = [], allocation._best_moves
    monkeypatch.setattr(allocation, "_best_moves", lambda *given: (rounds.append(1), best_moves(*given))[1])
    chosen = choose(offers, 80 * 8 * 170)
    assert price(chosen) <= 80 * 8 * 170 and len(rounds) < 10


def test_what_to_expect_of_a_prediction():
    checks = [Check(0.1, 0.2), Check(0.01, 0.01), Check(1.0, 4.0)]
    assert expected((), 0.1) is None
    assert expected(checks, 0.0) == 0.0
    assert expected(checks, 0.1) == pytest.approx(0.2)
    assert expected(checks, 0.001) == pytest.approx(0.001)
    assert expected(checks, 10.0) == pytest.approx(40.0)
    assert expected(checks, 0.1 * 10**0.5) == pytest.approx(3 * 0.1 * 10**0.5)
    assert expected([Check(0.0, 0.1), Check(0.5, 0.6)], 0.1) == pytest.approx(0.12)
