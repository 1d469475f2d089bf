"""Intervals of differences between models in the same trials."""

from random import Random
from statistics import fmean

import pytest

from headwise.records.skills import Difference, student


def test_the_interval_of_shares_is_that_of_agresti_and_min():
    """53 and 16 of 144 pairs differ one way and the other: their formula, with t of 143 degrees of freedom."""
    first, own = [1.0] * 16 + [0.0] * 128, [0.0] * 16 + [1.0] * 53 + [0.0] * 75
    both = Difference.of_shares(first, own)
    assert both.mean == pytest.approx(37 / 144)
    half = 1.97669 * ((53.5 + 16.5) - 37**2 / 146) ** 0.5 / 146
    assert (both.low, both.high) == (pytest.approx(37 / 146 - half, abs=1e-5), pytest.approx(37 / 146 + half, abs=1e-5))


def test_no_difference_in_a_few_trials_is_not_taken_for_none_at_all():
    same = Difference.of_shares([1.0] * 40, [1.0] * 40)
    assert same.mean == 0 and same.low == -same.high and 0.03 < same.high < 0.06
    assert Difference.of_shares([1.0] * 40, [1.0] * 40, decisions=5).high == pytest.approx(same.high * 42 / 202)
    assert Difference.of_shares([0.0] * 40, [1.0] * 40).low > 0.85
    assert Difference.of_shares([1.0], [0.0]) is None


def test_students_quantiles():
    """Of published tables."""
    for freedom, quantile in ((5, 2.571), (7, 2.365), (15, 2.131), (39, 2.023)):
        assert student(freedom) == pytest.approx(quantile, rel=0.01)


def test_nats_by_the_spread_of_pairs():
    own = Difference.of_nats([1.0] * 8, [1.5, 2.0, 2.5, 2.0] * 2)
    half = 2.365 * (1.0 / 7 / 8) ** 0.5
    assert own.mean == 1 and own.high - 1 == pytest.approx(half, rel=0.01) and own.high + own.low == pytest.approx(2)
    assert Difference.of_nats([1.0], [2.0]) is None


@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_nineteen_of_twenty_intervals_hold_the_truth(gap):
    random, held = Random(0), []
    for _ in range(1000):
        pairs = [(random.random(), random.random()) for _ in range(40)]
        first = [float(level < 0.6) for level, _ in pairs]
        own = [float((level if fate < 0.7 else fate * 10 % 1) < 0.6 + gap) for level, fate in pairs]
        interval = Difference.of_shares(first, own)
        held.append(interval.low <= gap <= interval.high)
    assert 0.93 < fmean(held) < 0.99
