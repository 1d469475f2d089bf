"""Blocks dropped and joined along the depth: the least loss there is, found by trying everything on small cases."""

import random

import pytest

from headwise.planning.depth import Span, fewest, shallowest

BLOCKS = 7


def some_spans(chance):
    """Every block stays or goes, and some runs of two or three become one, at random losses."""
    for first in range(BLOCKS):
        yield Span(first, 1, 1, 0.0, ((),))
        if chance.random() < 0.8:
            yield Span(first, 1, 0, chance.random(), ((),))
        for blocks in (2, 3):
            if first + blocks <= BLOCKS and chance.random() < 0.7:
                yield Span(first, blocks, 1, chance.random(), ((),) * blocks)


def tilings(spans, place=0):
    """All ways to take up every block once."""
    if place == BLOCKS:
        yield []
    for span in spans:
        if span.first == place:
            for rest in tilings(spans, place + span.blocks):
                yield [span, *rest]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_way_loses_less(seed):
    spans = list(some_spans(random.Random(seed)))
    every = list(tilings(spans))
    for limit in range(BLOCKS + 1):
        losses = [sum(s.loss for s in each) for each in every if sum(s.left for s in each) <= limit]
        chosen = shallowest(spans, BLOCKS, limit)
        assert (chosen is None) == (not losses)
        if chosen is not None:
            assert [span.first for span in chosen] == [sum(s.blocks for s in chosen[:i]) for i in range(len(chosen))]
            assert sum(span.left for span in chosen) <= limit
            assert sum(span.loss for span in chosen) == pytest.approx(min(losses))
    assert fewest(spans, BLOCKS) == min(sum(s.left for s in each) for each in every)
