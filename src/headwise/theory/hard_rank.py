"""How many distinct keys win when every query attends to one key only (hardmax attention).

Paper `rank` (On the Limitation and Redundancy of Transformers: A Rank Perspective): the rank of hardmax attention is
the number of distinct argmax columns, and with all keys equally likely to win it stays below 0.632 n. That is a limit
for random queries at zero temperature, not of attention as such (queries equal to unit-norm keys give rank n).

Assumed throughout: Gaussian untrained weights, tokens orthonormal up to ``o(n^{-3/2})`` (correlated tokens lower every
number here), temperature near zero. Causal softmax at any other temperature is triangular with a positive diagonal,
hence of full rank; only a rank with a tolerance means something there (`softmax_rank_tolerance`).
"""

import math
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headwise.files.errors import InputError

LIMIT = 1 - 1 / math.e
NODES = 64
STEPS = 60
WIDEST_SPREAD = 8.0
POINTS = 4096
CERTAIN = 1 - 1e-15  # a chance; 1 itself has no logarithm of what is left
FIRST_SPREAD = 3  # among fewer keys there is no typical maximum


def expected_winners(shares: ArrayLike, queries: int) -> float:
    """Expected number of distinct winners if key j wins a query with probability p_j: ``sum 1 - (1 - p_j)^queries``.

    The paper's low-rank barrier in the form from which it follows: the sum is concave, so equal shares give the most.
    """
    return float((1 - (1 - np.asarray(shares, dtype=np.float64)) ** queries).sum())


def expected_hard_rank(n: int) -> float:
    """Expected rank of n x n hardmax attention if all keys win equally often: ``n (1 - (1 - 1/n)^n)``.

    An upper bound for any i.i.d. queries, reached when all keys are equally likely; tends to ``(1 - 1/e) n``.
    """
    return n * (1 - (1 - 1 / n) ** n)


def expected_causal_hard_rank(n: int) -> float:
    """The same under a causal mask, where query i chooses among the first i keys: ``(n + 1) / 2``.

    Key j is never chosen with probability ``prod_{i >= j} (1 - 1/i) = (j - 1) / n``.
    """
    return (n + 1) / 2


def gaussian_hard_rank(n: int, head_dim: float) -> float:
    """Expected rank for Gaussian queries and keys of ``head_dim`` dimensions (our refinement of the paper's theorem).

    Keys of large norm win more often: the log of a key's share is about normal with variance ``t^4 / (2 head_dim)``,
    t the typical maximum of n standard normals. Within 0.016 n of simulation for ``head_dim >= 8``; saturation
    therefore needs ``head_dim`` well above ``ln(n)^2``, not just ``ln(n)``.
    """
    return n * _uneven_share(math.sqrt(_typical_maximum(n) ** 4 / (2 * head_dim)))


def gaussian_causal_hard_rank(n: int, head_dim: float) -> float:
    """The same under a causal mask: ``sum_j E_Z[1 - prod_{i >= j} (1 - exp(s_i Z - s_i^2 / 2) / i)]``.

    Query i chooses among the first i keys, so the log of a key's share spreads by ``s_i^2 = t(i)^4 / (2 head_dim)``, t
    the typical maximum of i standard normals. Within 0.007 n of simulation for ``head_dim >= 16``. Up to 4,095 tokens
    every key counts by itself, beyond that blocks of neighbours 1.005 times apart or less do (to a billion tokens).
    """
    edges = np.arange(1, n + 2) if n < POINTS else np.unique(np.geomspace(1, n + 1, POINTS).round()).astype(np.int64)
    counts, i = np.diff(edges), (edges[:-1] + edges[1:] - 1) / 2
    spread = np.array([_typical_maximum(each) ** 2 if each >= FIRST_SPREAD else 0.0 for each in i])
    spread = (spread / math.sqrt(2 * head_dim))[:, None]
    nodes, weights = _normal_nodes()
    chances = np.exp(spread * nodes - spread**2 / 2) / i[:, None]
    passed = np.log1p(-np.minimum(chances, CERTAIN))
    counts = counts[:, None]
    later = np.cumsum((passed * counts)[::-1], axis=0)[::-1]
    later -= (counts - 1) / 2 * passed  # a key meets half of its own block
    return float((counts * (1 - np.exp(later))).sum(axis=0) @ weights)


def head_dim_for_share(n: int, share: float) -> float:
    """Width at which Gaussian queries and keys reach ``share`` of the limit ``(1 - 1/e) n``.

    `gaussian_hard_rank` solved for ``head_dim``: ``t^4 / (2 sigma^2)`` with sigma a function of the share alone, so the
    width grows like ``(2 ln n)^2 / (2 sigma^2)``. The paper's ``Omega(log n)`` is true but no recipe: 90 % takes 41
    dimensions at n = 100 and 91 at n = 400 (simulated; 41 and 86 by this formula).
    """
    if not 0 < share < 1:
        raise InputError(f"A share of the limit lies between 0 and 1, got {share}.")
    narrow, wide = 0.0, WIDEST_SPREAD
    for _ in range(STEPS):
        middle = (narrow + wide) / 2
        if _uneven_share(middle) > share * LIMIT:
            narrow = middle
        else:
            wide = middle
    return _typical_maximum(n) ** 4 / (2 * wide**2)


def unit_key_hard_rank(n: int, head_dim: int) -> float:
    """Expected rank for Gaussian queries and keys of equal norm, as with a norm on the keys (our estimate).

    A key then wins in its Voronoi cell on the sphere of ``head_dim - 1`` dimensions. The size of such a cell, relative
    to the mean, is about gamma distributed with shape ``a = (3 head_dim - 2) / 2`` (Ferenc & Neda 2007), which makes
    the rank ``n (1 - (1 + 1/a)^-a)``: 5/9 n at two dimensions (exact for large n), 0.60 n at four. With one dimension
    two keys win all. Within 0.01 n of simulation for n of 100 or more.
    """
    if head_dim == 1:
        return float(min(n, 2))
    a = (3 * head_dim - 2) / 2
    return n * (1 - (1 + 1 / a) ** -a)


def softmax_gap(score_gap: ArrayLike, n: int, temperature: float) -> NDArray[np.float64]:
    """Lemma 1: l1 distance, at most, of a softmax row of n from the one-hot row of its winner.

    ``2 x / (1 + x)`` with ``x = (n - 1) e^{-g / T}``, g the winner's lead over the second score; the paper's form is
    ``2 x``.
    """
    x = (n - 1) * np.exp(-np.asarray(score_gap) / temperature)
    return 2 * x / (1 + x)


def softmax_rank_tolerance(score_gaps: ArrayLike, n: int, temperature: float) -> float:
    """Singular values above this number are at most as many as the hard rank, for a softmax map with these row gaps.

    Weyl: singular values move by at most the Frobenius norm of the difference, and a row's share of that is at most
    its `softmax_gap` over the square root of 2. Above 1 it says nothing: 0.63 n is a law of low temperatures.
    """
    return math.sqrt(float((softmax_gap(score_gaps, n, temperature) ** 2).sum()) / 2)


def _typical_maximum(n: int) -> float:
    root = math.sqrt(2 * math.log(n))
    return root - (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * root)


def _uneven_share(sigma: float) -> float:
    """Share of keys that win if the logarithms of their chances are normal with spread ``sigma``."""
    nodes, weights = _normal_nodes()
    return float(weights @ (1 - np.exp(-np.exp(sigma * nodes - sigma**2 / 2))))


@cache
def _normal_nodes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()
