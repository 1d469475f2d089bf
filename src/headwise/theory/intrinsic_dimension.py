"""How many independent look-ups a task has, from the errors of trained models.

Paper `heads`, section on experiments: with fewer heads than look-ups the error grows with the length of the text, with
enough heads that order breaks up. The paper reads the transition where its reversal score turns positive. On its own
tables that is one head early twice (a score of 0.06 at three heads for D = 4, and 2.6 at two heads for D = 3), so
`estimate_intrinsic_dimension` asks for reversals that outweigh the growth, which is right in all four synthetic tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headwise.files.errors import InputError

FEWEST_LENGTHS = 2


@dataclass(frozen=True, slots=True)
class IntrinsicDimension:
    """Bounds on the number of look-ups (None: more heads than were tried), and each head count's reversal score."""

    at_least: int
    at_most: int | None
    scores: tuple[float, ...]


def reversal_score(errors: ArrayLike) -> NDArray[np.float64]:
    """The paper's R: ``sum_{i<j} max(e_i - e_j, 0) / (max e - min e)`` over errors in order of length, 0 if all agree.

    Along the last axis. 0 for errors that grow with the length.
    """
    e = np.asarray(errors, dtype=np.float64)
    _, reversals = _changes(e)
    spread = np.ptp(e, axis=-1)
    return reversals / np.where(spread > 0, spread, 1.0)


def estimate_intrinsic_dimension(heads: Sequence[int], errors: ArrayLike, layers: int = 1) -> IntrinsicDimension:
    """The intrinsic dimension of the task on which models of ``heads`` heads (ascending) have ``errors``.

    ``errors`` has a row for each head count and a column for each length, ascending. Take errors relative to the
    variance of the target (which may change with the length), the same head width throughout, and the best of several
    seeds: at just enough heads some trainings fail to tell them apart. The first row that falls at least as much as it
    grows has enough heads; with several layers, ``layers * heads`` by Conjecture 1.
    """
    e = np.asarray(errors, dtype=np.float64)
    if e.shape[:-1] != (len(heads),) or e.shape[-1] < FEWEST_LENGTHS:
        raise InputError(
            f"Errors of shape {e.shape}: expected {len(heads)} rows, one per head count, of two or more lengths."
        )
    if not np.isfinite(e).all() or list(heads) != sorted(set(heads)):
        raise InputError("Errors must be finite, and head counts ascending.")
    growth, reversals = _changes(e)
    enough = np.flatnonzero(reversals >= growth)
    first = int(enough[0]) if enough.size else len(heads)
    return IntrinsicDimension(
        at_least=layers * heads[first - 1] + 1 if first else 1,
        at_most=layers * heads[first] if enough.size else None,
        scores=tuple(reversal_score(e).tolist()),
    )


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Error with too few heads: ``scale * T^length_power * exp(head_rate * heads / T^softening)``, a fit by the paper.

    Fewer heads than look-ups cost more the longer the text: ``head_rate < 0``, ``softening > 0``.
    """

    scale: float
    length_power: float
    head_rate: float
    softening: float

    def __call__(self, heads: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """The error of models with ``heads`` heads on texts of ``tokens``."""
        T = np.asarray(tokens, dtype=np.float64)
        return self.scale * T**self.length_power * np.exp(self.head_rate * np.asarray(heads) / T**self.softening)


def fit_scaling_law(heads: ArrayLike, tokens: ArrayLike, errors: ArrayLike, softenings: Sequence[float]) -> ScalingLaw:
    """Least squares in the logarithm of the errors, with the best of the given exponents ``softenings``."""
    h, T, logs = (np.asarray(values, dtype=np.float64).ravel() for values in (heads, tokens, np.log(errors)))
    fits = []
    for softening in softenings:
        design = np.stack([np.ones_like(T), np.log(T), h / T**softening], axis=1)
        coefficients = np.linalg.lstsq(design, logs, rcond=None)[0]
        fits.append((float(np.square(design @ coefficients - logs).sum()), softening, coefficients))
    _, softening, (log_scale, power, rate) = min(fits, key=lambda fit: fit[0])
    return ScalingLaw(float(np.exp(log_scale)), float(power), float(rate), softening)


def _changes(errors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of all rises and of all falls from a shorter length to a longer one."""
    steps = np.triu(errors[..., None, :] - errors[..., :, None], k=1)
    return np.maximum(steps, 0).sum(axis=(-2, -1)), np.maximum(-steps, 0).sum(axis=(-2, -1))
