"""How strongly attention still reacts to its logits, and what a narrower head does to it.

Paper `allocation`, Theorem 2 and Corollary 2: a row ``a = softmax(s)`` has the Jacobian ``J = diag(a) - a a^T``, its
norm falls like 1/L with the length L, and cutting a head's query-key product to rank r changes attention by
``O(Lambda / L)``, Lambda the part cut off. Three things the paper does not say:

- 1/L needs logits that stay bounded while L grows (`peak_bound`). With normal logits the norm falls more slowly, and
  with a spread of 3 hardly at all (`gaussian_peak`); the paper's own Figure 10 shows logits that grow.
- ``Lambda / L`` is true of single weights (`entry_change_bound`), because each of them is of that size. What reaches
  the output is their sum, and that change does not shrink with L (`row_change_bound`).
- Lambda is not defined in what we could read; here it is the largest change of a logit (`logit_change_bound`).

The worst norm of all is 1/2, at two equal weights; 1/4, which is quoted from Mudarisov et al. 2025 (arXiv 2508.17821)
for temperature 1, is the largest entry of J, not its norm.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

QUANTILES = 64


def jacobian_bound(attention: ArrayLike) -> NDArray[np.float64]:
    """Upper bound on the spectral norm of the Jacobian of each row: ``min(max a_i, max 2 a_i (1 - a_i))``.

    The first, from ``J <= diag(a)``, is tight for many small weights; the second, from the row sums of ``|J|``, when
    one weight takes nearly all. (`headwise.linalg.saturation` has the norm itself.)
    """
    a = np.asarray(attention)
    return np.minimum(a.max(axis=-1), (2 * a * (1 - a)).max(axis=-1))


def peak_bound(length: int, logit_bound: float) -> float:
    """The largest weight among L logits of size at most C: ``1 / (1 + (L - 1) e^{-2C})``, less than ``e^{2C} / L``.

    Reached by one logit of C against all others at -C.
    """
    return 1 / (1 + (length - 1) * math.exp(-2 * logit_bound))


def jacobian_length_bound(length: int, logit_bound: float) -> float:
    """Upper bound on the norm of the Jacobian if no logit exceeds ``logit_bound`` in size: the paper's law, O(1/L)."""
    return min(0.5, peak_bound(length, logit_bound))


def gaussian_peak(length: int, logit_std: float) -> float:
    """Expected largest weight for independent normal logits, which bounds the mean norm of the Jacobian (our estimate).

    Averages ``e^{sM} / (e^{sM} + (L - 1) E[e^{sZ} | Z < M])`` over the distribution of the maximum M of L standard
    normals. Within 10 % of simulation for s up to 3 and L from 4 to 1024. It falls like 1/L (up to slower factors)
    only while ``sqrt(2 ln L)`` is well above s.
    """
    normal = NormalDist()
    ranks = (np.arange(QUANTILES) + 0.5) / QUANTILES
    peaks = [normal.inv_cdf(rank ** (1 / length)) for rank in ranks]
    others = [
        (length - 1) * math.exp(logit_std**2 / 2 - logit_std * peak) * normal.cdf(peak - logit_std) / normal.cdf(peak)
        for peak in peaks
    ]
    return float(np.mean(1 / (1 + np.array(others))))


def logit_change_bound(
    singular_values: ArrayLike, rank: int, query_norm: float, key_norm: float, scale: float
) -> float:
    """Largest change of a logit ``scale * x^T W_q W_k^T y`` when ``W_q W_k^T`` is cut to its first ``rank`` directions.

    ``scale * sigma_{rank + 1} |x| |y|``, with ``singular_values`` largest first and ``scale`` that of the whole head.
    """
    values = np.append(np.asarray(singular_values, dtype=np.float64), 0.0)
    return scale * float(values[min(rank, len(values) - 1)]) * query_norm * key_norm


def entry_change_bound(logit_change: float, peak: float) -> float:
    """Largest change of a single weight, none above ``peak``, when no logit moves by more than ``logit_change``.

    ``a (1 - a) g / (1 + a g)`` with ``g = e^{2c} - 1`` at ``a = peak``, or its maximum ``tanh(c / 2)`` if that lies at
    a smaller a. With `peak_bound` for the peak this is Corollary 2: proportional to c / L for small c and large L.
    """
    loss = -math.expm1(-2 * logit_change)
    most = math.exp(-logit_change) / (1 + math.exp(-logit_change))
    return math.tanh(logit_change / 2) if peak >= most else peak * (1 - peak) * loss / (1 - (1 - peak) * loss)


def row_change_bound(logit_change: float) -> float:
    """Largest l1 change of a whole row when no logit moves by more than ``logit_change``: ``2 tanh(c / 2)``.

    There is no length in it, and none is possible: when keys that hold ``1 / (1 + e^c)`` of the weight, however many,
    move up by c and all others down, the row changes by just that.
    """
    return 2 * math.tanh(logit_change / 2)
