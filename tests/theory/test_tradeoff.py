"""The trade-off bound and its exact minimiser."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.files.errors import InputError
from headwise.theory.tradeoff import (
    _options,
    allocate,
    exponential_selection_error,
    extraction_bound,
    head_count_curve,
    lag_error,
    split_heads,
)

EQUAL = (1, 1, 1, 1)
GIVEN_UP = (0, 0)


def test_figure_1():
    heads = np.arange(1, 81)
    curve = head_count_curve(128, 16, heads)
    assert heads[curve.argmin()] == 8
    assert curve[[0, 1, 3, 7, 8, 9, 19, 79]].round(3).tolist() == [
        1.326,
        0.663,
        0.332,
        0.166,
        0.481,
        0.58,
        0.841,
        0.965,
    ]


@pytest.mark.parametrize(
    ("token_dim", "strengths", "groups", "error"),
    [
        (8, EQUAL, [(8, 8)] * 4, 0.683),
        (4, EQUAL, [(16, 4)] * 4, 0.342),
        (16, EQUAL, [(4, 16)] * 4, 1.367),
        (32, EQUAL, [(2, 32), (3, 32), (3, 32), GIVEN_UP], 2.574),
        (64, EQUAL, [(4, 64), GIVEN_UP, GIVEN_UP, GIVEN_UP], 3.332),
        (8, (1, 0.5, 0.25, 0.125), [(12, 8), (9, 8), (6, 8), (5, 8)], 0.278),
    ],
)
def test_table_of_the_notes(token_dim, strengths, groups, error):
    allocation = allocate(256, token_dim, strengths)
    assert list(allocation.groups) == groups
    assert allocation.error == pytest.approx(error, abs=5e-4)


def every_allocation(width, lags):
    pairs = [GIVEN_UP, *((h, w) for h in range(1, width + 1) for w in range(1, width // h + 1))]
    return (groups for groups in itertools.product(pairs, repeat=lags) if sum(h * w for h, w in groups) <= width)


@given(
    st.integers(1, 3).flatmap(
        lambda lags: st.tuples(
            st.integers(1, {1: 40, 2: 18, 3: 8}[lags]),
            st.integers(1, 10),
            st.lists(st.floats(0, 2), min_size=lags, max_size=lags),
        )
    )
)
def test_nothing_beats_the_allocator(instance):
    width, token_dim, strengths = instance
    allocation = allocate(width, token_dim, strengths)
    best = min(extraction_bound(groups, token_dim, strengths) for groups in every_allocation(width, len(strengths)))
    assert allocation.error == pytest.approx(best, abs=1e-12)
    assert extraction_bound(allocation.groups, token_dim, strengths) == pytest.approx(allocation.error, abs=1e-12)
    assert sum(heads * head_dim for heads, head_dim in allocation.groups) <= width


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 10), st.lists(st.floats(0, 2), min_size=1, max_size=3))
def test_nothing_beats_the_split_of_given_heads(heads, head_dim, token_dim, strengths):
    allocation = split_heads(heads, head_dim, token_dim, strengths)
    shares = itertools.product(range(heads + 1), repeat=len(strengths))
    best = min(
        extraction_bound([(count, head_dim) if count else GIVEN_UP for count in counts], token_dim, strengths)
        for counts in shares
        if sum(counts) <= heads
    )
    assert allocation.error == pytest.approx(best, abs=1e-12)
    assert extraction_bound(allocation.groups, token_dim, strengths) == pytest.approx(allocation.error, abs=1e-12)
    assert sum(group.heads for group in allocation.groups) <= heads


def test_heads_get_narrower_only_just_short_of_one_more():
    assert allocate(88, 30, [1]).groups == ((3, 29),)
    assert allocate(90, 30, [1]).groups == ((3, 30),)


def test_a_wide_layer_leaves_few_sizes_to_try():
    strengths = [0.97**lag for lag in range(64)]
    assert max(len(sizes) for sizes, _ in _options(8192, 128, strengths)) < 8192 / 20
    allocation = allocate(8192, 128, strengths)
    assert sum(heads * head_dim for heads, head_dim in allocation.groups) == 8192


def test_lags_without_heads_cost_their_strength():
    assert extraction_bound([(8, 16)], 16, [1, 0.5, 0.25]) == pytest.approx(float(lag_error(8, 16, 16, 1)) + 0.75)
    assert extraction_bound([], 16, [1, 0.5]) == 1.5


def test_slack_raises_only_the_projection():
    assert lag_error(4, 12, 16, 1, slack=0.5) - lag_error(4, 12, 16, 1) == pytest.approx(0.25)
    assert lag_error(4, 16, 16, 1, slack=0.5) == lag_error(4, 32, 16, 1)


@pytest.mark.parametrize(("lag", "error"), [(1, 0.866), (2, 0.809), (3, 0.781), (4, 0.766)])
def test_few_exponentials_cannot_select_a_lag(lag, error):
    """Equal rates are the best ones; from lag 2 the selection term of the bound promises less than is possible."""
    best = min(exponential_selection_error(lag, [rate] * lag) for rate in np.linspace(0.01, 0.99, 99))
    assert best == pytest.approx(error, abs=1e-3)
    assert (best > lag_error(lag, 1, 1, lag)) == (lag > 1)
    assert exponential_selection_error(lag, [1e-4] * (lag + 1)) < 1e-3


def test_exponentials_against_least_squares():
    rates = np.array([0.2, 0.5, 0.85])
    design = rates ** np.arange(400)[:, None]
    target = np.arange(400) == 3
    residual = design @ np.linalg.lstsq(design, target, rcond=None)[0] - target
    assert exponential_selection_error(3, rates.tolist()) == pytest.approx(np.linalg.norm(residual))


@pytest.mark.parametrize("wrong", [(0, 8, [1]), (8, 0, [1]), (8, 8, [-1])])
def test_wrong_input(wrong):
    with pytest.raises(InputError):
        allocate(*wrong)
    with pytest.raises(InputError, match="2 groups of heads for 1 lags"):
        extraction_bound([(1, 1), (1, 1)], 8, [1])
