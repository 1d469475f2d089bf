"""The order of rows: every round holds all of them once, whatever pieces it is taken in."""

import torch

from headwise.training.order import shuffled


def test_rounds_are_whole_and_differ():
    taken = torch.cat([shuffled(7, first, 3, seed=1) for first in range(0, 21, 3)])
    rounds = taken.split(7)
    assert all(sorted(each.tolist()) == list(range(7)) for each in rounds)
    assert not torch.equal(rounds[0], rounds[1])
    assert torch.equal(taken[5:16], shuffled(7, 5, 11, seed=1))
    assert not torch.equal(taken, shuffled(7, 0, 21, seed=2))
