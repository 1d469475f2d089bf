"""The order of rows in training, from a seed alone."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def shuffled(count: int, first: int, number: int, seed: int) -> Tensor:
    """Which of ``count`` rows are places ``first`` to ``first + number``: every epoch is shuffled anew."""
    places = torch.arange(first, first + number)
    return torch.stack([_epoch(count, seed, place // count)[place % count] for place in places.tolist()])


@lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def _epoch(count: int, seed: int, number: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + number))
