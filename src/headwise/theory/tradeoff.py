"""Heads against head width in an early layer that gathers past tokens: the error bound and its exact minimiser.

Paper `allocation` (Allocation of Parameters in Transformers), Theorem 1 and Problem (5). One attention layer of total
width D computes a causal convolution ``y_t = sum_m rho_m x_{t-m}`` of tokens with d dimensions and norm at most B.
Group m of its heads, ``heads`` of ``head_dim`` each, fetches lag m:

    E <= sum_m |rho_m| B ((1 + eps) sqrt(1 - d_m/d) + 1.3 e^{0.02 m} / H_m)  +  sum over lags without heads |rho_k| B

Read it as a modelling rule, not as a certificate. Its first part is the expected loss of a random projection to d_m
dimensions (none if d_m >= d). Its second part cannot hold for position kernels that are sums of H_m exponentials:
lag 4 with 4 heads leaves at least 0.766 where the rule says 0.352, and 5 heads leave nothing
(`exponential_selection_error`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headwise.files.errors import InputError

SELECTION = 1.3
SELECTION_GROWTH = 0.02


class HeadGroup(NamedTuple):
    """The heads that fetch one lag, and their width; (0, 0) if the lag is given up."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """One group for each lag, the first for lag 1, and the error that the rule predicts for them."""

    groups: tuple[HeadGroup, ...]
    error: float


def lag_error(
    heads: ArrayLike, head_dim: ArrayLike, token_dim: int, lag: ArrayLike, slack: float = 0.0
) -> NDArray[np.float64]:
    """Relative error of fetching one lag: ``(1 + slack) sqrt(1 - head_dim/token_dim) + 1.3 e^{0.02 lag} / heads``.

    ``slack`` is the paper's eps, the price of a statement with high probability instead of one in the mean; its value
    as a function of that probability is not known, and Problem (5) leaves it out. A lag that is given up costs 1,
    less than one head of any width.
    """
    lost = np.sqrt(np.maximum(1 - np.asarray(head_dim) / token_dim, 0))
    return (1 + slack) * lost + SELECTION * np.exp(SELECTION_GROWTH * np.asarray(lag)) / np.asarray(heads)


def extraction_bound(
    groups: Sequence[tuple[int, int]], token_dim: int, strengths: Sequence[float], slack: float = 0.0
) -> float:
    """Theorem 1 for a layer of ``groups`` (heads, head_dim): the first for lag 1, (0, 0) for a lag given up.

    ``strengths`` are the ``|rho_m|_2 B`` of all lags that matter; lags beyond the groups are given up too.
    """
    if len(groups) > len(strengths):
        raise InputError(f"{len(groups)} groups of heads for {len(strengths)} lags: give every group's lag a strength.")
    padded = [*groups, *[(0, 0)] * (len(strengths) - len(groups))]
    errors = [
        float(lag_error(heads, head_dim, token_dim, lag, slack)) if heads else 1.0
        for lag, (heads, head_dim) in enumerate(padded, start=1)
    ]
    return float(np.dot(strengths, errors))


def head_count_curve(width: int, token_dim: int, heads: ArrayLike) -> NDArray[np.float64]:
    """Error of one lag against the number of heads that share ``width`` (Figure 1 of the paper: 128, tokens of 16).

    Heads are ``width / heads`` wide, fractions included. The minimum lies at heads as wide as a token.
    """
    return lag_error(heads, width / np.asarray(heads), token_dim, 1)


def allocate(width: int, token_dim: int, strengths: Sequence[float]) -> Allocation:
    """The groups of least predicted error with ``sum heads * head_dim <= width``, exactly (Problem (5)).

    Dynamic programming over the budget: the best errors of the first m lags, for every budget at once, are the
    min-plus convolution of those of m - 1 lags with the options of lag m, of which only those count that beat all
    smaller ones. The paper asks for all of the width; here some may be left over, for a width that does not factor well
    should not make the layer worse. The paper gives up only the last lags; here the weakest may go wherever they are.

    Nearly always the optimum has ``head_dim = token_dim``, since the square root is infinitely steep there, and the
    rest of the width goes into heads; with too little width, lags are given up before heads get narrower. The
    exceptions are widths just short of one more head (88 for tokens of 30: three heads of 29).
    """
    if width < 1 or token_dim < 1 or min(strengths, default=0) < 0:
        raise InputError(
            f"Width {width} and token dimension {token_dim} must be at least 1, strengths at least 0: {strengths}."
        )
    sizes, error = _cheapest(_options(width, token_dim, strengths), width)
    return Allocation(tuple(_group(size, token_dim, lag) for lag, size in enumerate(sizes, start=1)), error)


def split_heads(heads: int, head_dim: int, token_dim: int, strengths: Sequence[float]) -> Allocation:
    """The same for a layer whose ``heads`` are there already, all ``head_dim`` wide: how many fetch which lag.

    What the rule predicts for any given layer, at its best; `allocate` is free to choose the width as well.
    """
    counts = np.arange(heads + 1)
    options = []
    for lag, strength in enumerate(strengths, start=1):
        errors = strength * np.append(1.0, lag_error(counts[1:], head_dim, token_dim, lag))
        better = np.diff(np.minimum.accumulate(errors), prepend=np.inf) < 0
        options.append((counts[better], errors[better]))
    chosen, error = _cheapest(options, heads)
    return Allocation(tuple(HeadGroup(count, head_dim if count else 0) for count in chosen), error)


def exponential_selection_error(lag: int, rates: Sequence[float]) -> float:
    """Least l2 error of ``1{t = lag}``, t >= 0, as a sum of ``c_i rates_i^t`` with free c: what the rule overlooks.

    Generating functions turn the span of the exponentials into the complement of ``B H^2``, B the Blaschke product
    ``prod (z - q_i) / (1 - q_i z)`` of the rates; the error is the norm of B's coefficients up to ``lag``. Rates near 0
    reach every lag below their number, with coefficients that explode; fewer heads than ``lag + 1`` never do.
    """
    coefficients = np.zeros(lag + 1)
    coefficients[0] = 1.0
    for rate in rates:
        expansion = np.append(-rate, (1 - rate**2) * rate ** np.arange(lag))
        coefficients = np.convolve(coefficients, expansion)[: lag + 1]
    return math.sqrt(coefficients @ coefficients)


def _cheapest(options: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], budget: int) -> tuple[list[int], float]:
    """One size of each list of (sizes, errors), at most ``budget`` together, with the least sum of errors."""
    best = [np.zeros(budget + 1)]
    for sizes, errors in options:
        total = best[-1] + errors[0]
        for size, error in zip(sizes[1:], errors[1:]):
            np.minimum(total[size:], best[-1][: budget + 1 - size] + error, out=total[size:])
        best.append(total)
    chosen: list[int] = []
    left = budget
    for before, (sizes, errors) in zip(reversed(best[:-1]), reversed(options), strict=True):
        fits = sizes <= left
        chosen.append(int(sizes[fits][np.argmin(before[left - sizes[fits]] + errors[fits])]))
        left -= chosen[-1]
    return chosen[::-1], float(best[-1][-1])


def _options(
    width: int, token_dim: int, strengths: Sequence[float]
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """For each lag the group sizes ``heads * head_dim`` that beat all smaller ones, from 0 (given up), and errors."""
    lags = np.arange(1, len(strengths) + 1)[:, None]
    errors = np.full((len(strengths), width + 1), np.inf)
    errors[:, 0] = 1.0
    for head_dim in range(1, min(token_dim, width) + 1):
        heads = np.arange(1, width // head_dim + 1)
        multiples = errors[:, head_dim::head_dim]
        np.minimum(multiples, lag_error(heads, head_dim, token_dim, lags), out=multiples)
    least = np.minimum.accumulate(errors, axis=1) * np.asarray(strengths, dtype=np.float64)[:, None]
    menus = []
    for row in least:
        sizes = np.flatnonzero(np.diff(row, prepend=np.inf) < 0)
        menus.append((sizes, row[sizes]))
    return menus


def _group(size: int, token_dim: int, lag: int) -> HeadGroup:
    if not size:
        return HeadGroup(0, 0)
    widths = np.arange(1, min(token_dim, size) + 1)
    widths = widths[size % widths == 0]
    head_dim = int(widths[np.argmin(lag_error(size // widths, widths, token_dim, lag))])
    return HeadGroup(size // head_dim, head_dim)
