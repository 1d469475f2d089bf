"""What the papers' formulas say about a draft, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from headwise.records.blueprint import Images, Text
from headwise.theory.conditioning import gaussian_condition
from headwise.theory.hard_rank import (
    LIMIT,
    expected_causal_hard_rank,
    gaussian_causal_hard_rank,
    gaussian_hard_rank,
)
from headwise.theory.heads_needed import LowerBound, lower_bound
from headwise.theory.tradeoff import HeadGroup, split_heads

BITS_STEP = 8


def token_dim(reads: Text | Images) -> int:
    """Dimensions that a token brings into the first layer, the d of paper `allocation`.

    All numbers of a patch; of a word of a vocabulary V the log2 V coordinates that tell it from all others, in steps of
    8. The paper has no rule for words: this one is ours.
    """
    if isinstance(reads, Images):
        return reads.channels * reads.patch**2
    return BITS_STEP * math.ceil(math.log2(max(reads.vocab, 2)) / BITS_STEP)


@cache
def rank_share(reads: Text | Images, head_dim: int) -> float:
    """Share of its limit that the hard rank of a head reaches at initialisation.

    The limit is (n + 1) / 2 for texts, whose tokens see only what came before, and (1 - 1/e) n for images.
    """
    n = reads.tokens
    if isinstance(reads, Text):
        return gaussian_causal_hard_rank(n, head_dim) / expected_causal_hard_rank(n)
    return gaussian_hard_rank(n, head_dim) / (LIMIT * n)


def condition(tokens: int, layers: Sequence[HeadGroup]) -> float:
    """The worst condition number among the layers' concatenated heads, were they Gaussian."""
    return max(gaussian_condition(tokens, heads * head_dim) for heads, head_dim in layers)


def tradeoff(reads: Text | Images, lags: Sequence[float], first: HeadGroup) -> float:
    """Predicted error of gathering ``lags`` in the first layer, its heads shared out at their best."""
    return split_heads(first.heads, first.head_dim, token_dim(reads), lags).error


def missing_heads(tokens: int, first: HeadGroup, intrinsic_dim: int | None) -> LowerBound | None:
    """What fewer heads than look-ups cost in the first layer; None if there are enough, or nobody knows how many."""
    if intrinsic_dim is None or first.heads >= intrinsic_dim:
        return None
    return lower_bound(tokens, first.head_dim, first.heads, intrinsic_dim)
