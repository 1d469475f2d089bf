"""The auction against every possible choice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.records.allocation import Lot, allocate
from headwise.records.errors import InputError


def curve(steps, pairs):
    """A convex damage curve from damages of single units, least felt cut first; ``pairs``: two dimensions each."""
    cut = list(itertools.accumulate(sorted(steps), initial=0.0))[::-1]
    if not pairs:
        return cut
    spread = [None] * (2 * len(cut) - 1)
    spread[::2] = cut
    return spread


lots = st.lists(
    st.builds(
        lambda steps, price, pairs: Lot(0, "qk", curve(steps, pairs), price),
        st.lists(st.floats(0, 1), min_size=8, max_size=8),
        st.sampled_from([1, 2, 4]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


@given(lots=lots, share=st.floats(0.5, 1.0))
def test_no_choice_of_at_most_that_cost_is_better(lots, share):
    full = sum(lot.price * (len(lot.damage) - 1) for lot in lots)
    widths = allocate(lots, share * full, 4)
    spent = sum(lot.price * width for lot, width in zip(lots, widths, strict=True))
    damage = sum(lot.damage[width] for lot, width in zip(lots, widths, strict=True))
    assert spent <= share * full * (1 + 1e-9)
    for other in itertools.product(*(lot.widths(4) for lot in lots)):
        if sum(lot.price * width for lot, width in zip(lots, other, strict=True)) <= spent + 1e-9:
            assert damage <= sum(lot.damage[width] for lot, width in zip(lots, other, strict=True)) + 1e-9


def test_an_infeasible_budget_says_what_is_feasible():
    with pytest.raises(InputError, match=r"Keeping 10\.0% is not possible .* the least is 50\.0%"):
        allocate([Lot(0, "v", curve([1.0] * 16, False), 1)], 1.6, 8)
