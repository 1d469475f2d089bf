"""Models that need no training: what Theorem 2 of paper `heads` builds, runnable, with the errors it promises.

The task (`RetrievalTask`): D look-ups ``z_i = min_{t in S_i} f_i(x_t)`` in a text of T tokens, combined by F0. Arrays
are B texts x T tokens x d dimensions of a token; values of the f_i lie between 0 and 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RetrievalTask:
    """``combine(min over subset 1 of feature 1, ...)``: the paper's generalised D-retrieval.

    ``features`` take (..., d) to (...), ``combine`` takes (..., D) to (...), and ``subsets`` (D x T, true or false)
    says which tokens each look-up searches. A maximum is a look-up of ``1 - f``.
    """

    features: tuple[Callable[[Array], Array], ...]
    subsets: NDArray[np.bool_]
    combine: Callable[[Array], Array]

    def __call__(self, x_BTd: Array) -> Array:
        """The exact answers."""
        return self.combine(np.where(self.subsets, self.values(x_BTd), np.inf).min(axis=-1))

    def values(self, x_BTd: Array) -> Array:
        """All features of all tokens, B x D x T."""
        return np.stack([feature(x_BTd) for feature in self.features], axis=-2)


@dataclass(frozen=True, slots=True)
class OneHeadPerLookUp:
    """Theorem 2(1): head i, two dimensions wide, is a soft minimum over the tokens of look-up i.

    A token is encoded as ``(f_i(x_t), r_i(t))`` with the gate ``r_i = 0`` on the subset and ``-gate`` elsewhere; the
    key matrix ``[-1, 1]`` makes their difference the score, the value matrix is the identity, ``sharpness`` is beta. To
    see what approximate features do, give it a task of approximate features.

    Corrected: the paper's gate of 1 lets a token outside the subset with f = 0 tie with one inside with f = 1, and the
    head is then off by up to 3/4 at any sharpness. A gate of 2 (or halved features with a gate of 1, if the encoder
    must stay within norm 1) makes the paper's bound true, see `lookup_error_bound`.
    """

    task: RetrievalTask
    sharpness: float
    gate: float = 2.0

    def __call__(self, x_BTd: Array) -> Array:
        """The model's answers."""
        return self.task.combine(self.look_ups(x_BTd))

    def look_ups(self, x_BTd: Array) -> Array:
        """What the heads find, B x D."""
        values_BDT = self.task.values(x_BTd)
        gates_BDT = np.broadcast_to(np.where(self.task.subsets, 0.0, -self.gate), values_BDT.shape)
        encoded_BDT2 = np.stack([values_BDT, gates_BDT], axis=-1)
        scores_BDT = self.sharpness * (encoded_BDT2 @ np.array([-1.0, 1.0]))
        weights_BDT = np.exp(scores_BDT - scores_BDT.max(axis=-1, keepdims=True))
        weights_BDT /= weights_BDT.sum(axis=-1, keepdims=True)
        return np.einsum("bdt,bdtv->bdv", weights_BDT, encoded_BDT2)[..., 0]


def lookup_error_bound(tokens: int, subset: int, sharpness: float, gate: float = 2.0) -> float:
    """How far a head of `OneHeadPerLookUp` is from its minimum, over ``subset`` of ``tokens`` tokens, at most.

    ``(|S| - 1) / (e beta) + (T - |S|) e^{-beta (gate - 1)}``; the paper writes T for ``T - |S|``. It also says that the
    head never falls below the minimum, but tokens outside the subset may pull it down by the second term. Infinite for
    the paper's gate of 1, where no such bound is true.
    """
    if gate <= 1:
        return math.inf
    return (subset - 1) / (math.e * sharpness) + (tokens - subset) * math.exp(-sharpness * (gate - 1))


def sharpness_needed(tokens: int, look_ups: int, slope: float, error: float) -> float:
    """Sharpness that keeps `OneHeadPerLookUp` within ``error`` of a task with exact features: ``4 T L0 D / error``.

    ``slope`` is L0, the largest sum of F0's absolute partial derivatives. The paper's rule, ``max(1, 4 C L0 D / eps,
    log(4 C L0 D / eps))`` with ``C = max(T / e, T)``, comes to this. It leaves half of the error to features that are
    off by up to ``error / (4 L0 D)``.
    """
    return max(1.0, 4 * tokens * slope * look_ups / error)


@dataclass(frozen=True, slots=True)
class MaxNetwork:
    """The maximum of numbers between 0 and 1 by two hidden ReLU layers, too large by less than ``error`` (Lemma 9).

    With ``m = ceil(1 / error)`` and ``S_j = sum_t relu(x_t - j/m)``: ``sum_{j<m} relu(S_j) - relu(S_j - 1/m)``.
    """

    error: float

    @property
    def steps(self) -> int:
        """Steps m of the staircase."""
        return math.ceil(1 / self.error)

    def hidden(self, inputs: int) -> tuple[int, int]:
        """Neurons of the two layers, ``(T m, 2 m)``; the paper allows ``2 T m`` for each."""
        return inputs * self.steps, 2 * self.steps

    def __call__(self, values: Array) -> Array:
        """Maxima along the last axis."""
        above = np.maximum(values[..., None] - np.arange(self.steps) / self.steps, 0).sum(axis=-2)
        return (np.maximum(above, 0) - np.maximum(above - 1 / self.steps, 0)).sum(axis=-1)


@dataclass(frozen=True, slots=True)
class MemorisingHead:
    """Theorem 2(3): one head, ``T d`` wide, hands the whole text to a feed-forward network that does the work.

    Token t is encoded as ``e_t (x) x_t``, attention is uniform, so the head holds all tokens divided by T; the network
    computes features, then minima by ``1 - max(1 - f)`` with `MaxNetwork`, then F0. Every look-up is too small by less
    than ``error``, so the answer is off by less than F0's slope L0 times that.
    """

    task: RetrievalTask
    error: float

    def __call__(self, x_BTd: Array) -> Array:
        """The model's answers."""
        B, T, d = x_BTd.shape
        encoded_BTE = np.einsum("ts,btd->btsd", np.eye(T), x_BTd).reshape(B, T, T * d)
        head_BE = encoded_BTE.mean(axis=1)
        values_BDT = self.task.values(T * head_BE.reshape(B, T, d))
        largest = MaxNetwork(self.error)
        minima = [1 - largest(1 - values_BDT[:, i, subset]) for i, subset in enumerate(self.task.subsets)]
        return self.task.combine(np.stack(minima, axis=-1))
