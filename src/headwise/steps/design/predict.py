"""What the papers' formulas say about a draft, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwise.records.blueprint import Images, Text
from headwise.theory.conditioning import gaussian_condition
from headwise.theory.hard_rank import LIMIT, gaussian_hard_rank
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


def rank_share(tokens: int, head_dim: int) -> float:
    """Share of the limit (1 - 1/e) n that the hard rank of a head reaches at initialisation."""
    return gaussian_hard_rank(tokens, head_dim) / (LIMIT * tokens)


def condition(tokens: int, layers: Sequence[HeadGroup]) -> float:
    """The worst condition number among the layers' concatenated heads, were they Gaussian."""
    return max(gaussian_condition(tokens, heads * head_dim) for heads, head_dim in layers)


def tradeoff(reads: Text | Images, lags: Sequence[float], first: HeadGroup) -> float:
    """Predicted error of gathering ``lags`` in the first layer, its heads shared out at their best."""
    return split_heads(first.heads, first.head_dim, token_dim(reads), lags).error


def missing_heads(tokens: int, first: HeadGroup, intrinsic_dim: int) -> LowerBound | None:
    """What fewer heads than look-ups cost in the first layer; None if there are enough."""
    if first.heads >= intrinsic_dim:
        return None
    return lower_bound(tokens, first.head_dim, first.heads, intrinsic_dim)
