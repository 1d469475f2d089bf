"""Head counts and exponents of paper `heads`, with the values of the notes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.files.errors import InputError
from headwise.theory.heads_needed import (
    first_meaningful_length,
    heads_needed,
    length_that_fixes_dimension,
    lower_bound,
    upper_bound_exponent,
)


def test_heads_needed():
    assert [heads_needed(4), heads_needed(3), heads_needed(4, layers=2), heads_needed(5, layers=2)] == [4, 3, 2, 3]


@pytest.mark.parametrize(("heads", "exponent"), [(1, 1.8), (2, 0.42), (3, -0.07)])
def test_exponents_of_the_synthetic_task(heads, exponent):
    bound = lower_bound(128, 8, heads, 4)
    assert bound.exponent == pytest.approx(exponent, abs=5e-3)
    assert bound.vacuous == (heads == 3) == ("vacuous" in str(bound))
    assert bound.exponent_of_deep_readout == bound.exponent / 4


@pytest.mark.parametrize(
    ("head_dim", "look_ups", "lengths"),
    [
        (8, 4, {1: 57, 2: 97, 3: 137}),
        (2, 4, {1: 33, 2: 49, 3: 65}),
        (32, 12, {1: 185, 2: 321, 3: 457, 11: 1545}),
        (16, 10, {1: 113, 2: 185, 3: 257, 9: 689}),
    ],
)
def test_first_lengths_of_the_notes(head_dim, look_ups, lengths):
    for heads, tokens in lengths.items():
        assert first_meaningful_length(head_dim, heads, look_ups) == tokens


@given(st.integers(1, 256), st.integers(2, 64).flatmap(lambda D: st.tuples(st.just(D), st.integers(1, D - 1))))
def test_first_length_is_where_the_bound_turns_positive(head_dim, task):
    look_ups, heads = task
    tokens = first_meaningful_length(head_dim, heads, look_ups)
    assert not lower_bound(tokens, head_dim, heads, look_ups).vacuous
    assert lower_bound(tokens - 1, head_dim, heads, look_ups).vacuous


@pytest.mark.parametrize("heads", [0, 4, 5])
def test_lower_bound_is_about_too_few_heads(heads):
    with pytest.raises(InputError, match="1 to 3 heads"):
        lower_bound(128, 8, heads, 4)


def test_upper_bounds():
    assert upper_bound_exponent(64, 4, 2, 4, 4) == 2
    assert upper_bound_exponent(64, 4, 256, 1, 4) == 3
    assert upper_bound_exponent(64, 4, 256, 1, 4, gamma=4) == 5
    assert upper_bound_exponent(64, 4, 255, 3, 4) is None
    assert upper_bound_exponent(64, 4, 1, 4, 4) is None


def test_dimension_is_intrinsic_in_long_texts():
    """With as many tokens the lower bound for D1 heads excludes even the widest of the two tasks (margin 12.1)."""
    assert length_that_fixes_dimension(3, 4) == 1250
    margins = [
        lower_bound(length_that_fixes_dimension(a, b), 2, a, b).exponent - b for b in range(2, 61) for a in range(1, b)
    ]
    assert min(margins) == pytest.approx(12.1, abs=0.05)
