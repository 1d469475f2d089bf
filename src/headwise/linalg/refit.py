"""Closed-form refit of a reduced layer: its queries to the dense attention, its outputs to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 10  # of conjugate gradients
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of the mean weight of a coordinate
LIKELY = 1  # of them is tried first
Turn = Callable[[Tensor], Tensor]


def attention_hessian_and_gradient(logits_BHRS: Tensor, keys_BGSK: Tensor) -> tuple[Tensor, Tensor]:
    """Hessian (B, H, R, K, K) and downhill gradient (B, H, R, K) in queries that meet other ``keys``.

    To second order, the KL divergence of the rows ``softmax(logits)`` from those of queries ``q`` on ``keys`` is
    ``q' hessian q / 2 - q' gradient``: the covariance of the keys under each row, and that of keys and logits. The
    gradient points downhill (minus the derivative at q = 0). Constants added to a row cancel.
    """
    B, H, R, S = logits_BHRS.shape
    G, K = keys_BGSK.shape[1], keys_BGSK.shape[-1]
    rows = logits_BHRS.softmax(-1)
    logits = torch.where(rows > 0, logits_BHRS, 0.0)
    centred = rows * (logits - (rows * logits).sum(-1, keepdim=True))
    rows_BGNS, centred_BGNS = (t.reshape(B, G, -1, S) for t in (rows, centred))
    i, j = torch.triu_indices(K, K)
    mean = rows_BGNS @ keys_BGSK
    upper = rows_BGNS @ (keys_BGSK[..., i] * keys_BGSK[..., j]) - mean[..., i] * mean[..., j]
    hessian = upper.new_empty(*mean.shape, K)
    hessian[..., i, j] = upper
    hessian[..., j, i] = upper
    return hessian.view(B, H, R, K, K), (centred_BGNS @ keys_BGSK).view(B, H, R, K)


def fit_queries(
    hessian_HNKK: Tensor, gradient_HNK: Tensor, features_HNF: Tensor, turn: Turn, turn_back: Turn, penalty: float
) -> Tensor:
    """The maps (H, K, F) whose queries ``turn(features @ map.T)`` minimise that KL; ``turn`` applies RoPE.

    Conjugate gradients for all heads at once: the normal equations would have (K F)^2 numbers. ``penalty`` shrinks the
    maps, each entry in proportion to its diagonal of the Hessian.
    """
    curvature_HK = hessian_HNKK.diagonal(dim1=-2, dim2=-1).mean(1)
    rounding = torch.finfo(curvature_HK.dtype).eps * curvature_HK.amax(-1, keepdim=True)  # the rest is no curvature
    weight = curvature_HK.maximum(rounding)[:, :, None] * features_HNF.square().sum(1)[:, None]
    weight = weight.clamp(min=torch.finfo(weight.dtype).tiny ** 0.5)

    def gather(x_HNK: Tensor) -> Tensor:
        return turn_back(x_HNK).mT @ features_HNF

    def hessian_times(maps: Tensor) -> Tensor:
        queries = turn(features_HNF @ maps.mT)
        return gather((hessian_HNKK @ queries[..., None])[..., 0]) + penalty * weight * maps

    rest = gather(gradient_HNK)
    maps, step = torch.zeros_like(rest), torch.zeros_like(rest)
    before = torch.ones_like(rest[:, :1, :1])
    for _ in range(STEPS):
        ready = rest / weight
        now = (rest * ready).sum((1, 2), keepdim=True)
        step = ready + now / before * step
        moved = hessian_times(step)
        length = now / (step * moved).sum((1, 2), keepdim=True).clamp(min=torch.finfo(now.dtype).tiny)
        maps, rest, before = maps + length * step, rest - length * moved, now.clamp(min=torch.finfo(now.dtype).tiny)
    return maps


def fit_temperature(hessian_HNKK: Tensor, gradient_HNK: Tensor, queries_HNK: Tensor) -> Tensor:
    """The relative growth of each head's queries that minimises the KL, (H,): a change of temperature alone."""
    curvature = (hessian_HNKK @ queries_HNK[..., None])[..., 0]
    needed = (queries_HNK * curvature).sum((1, 2))
    return (queries_HNK * gradient_HNK).sum((1, 2)) / needed.clamp(min=torch.finfo(needed.dtype).tiny)


class OutputFit:
    """Weighted ridge regression of a layer's output error on the outputs of its heads, summed batch by batch.

    The penalty is cross-validated: fitted to one half of every batch, each is scored on the other. Tokens that are held
    out are not fitted to: what does not lower their error is not worth anything.
    """

    def __init__(self) -> None:
        self._halves: list[tuple[Tensor, Tensor]] = []
        self._held_out: list[tuple[Tensor, Tensor]] = []

    def add(self, heads_NC: Tensor, error_ND: Tensor, weight_N: Tensor, *, held_out: bool = False) -> None:
        """Add tokens: all heads' outputs, the error left after their projection, and the weight of each token."""
        middle = len(heads_NC) // 2
        parts = (slice(None),) if held_out else (slice(None, middle), slice(middle, None))
        total = self._held_out if held_out else self._halves
        for place, some in enumerate(parts):
            heads, error = heads_NC[some], error_ND[some]
            weighted = heads * weight_N[some, None]
            sums = (weighted.mT @ heads).double(), (weighted.mT @ error).double()
            if len(total) <= place:
                total.append(sums)
            else:
                gram, cross = total[place]
                total[place] = gram + sums[0], cross + sums[1]

    def solve(self) -> Tensor:
        """The correction (C, D), each head coordinate shrunk in proportion to its energy, whatever its scale.

        Zero where no penalty lowers the error on the other half, or the chosen one that of tokens held out.
        """
        assert self._halves, "nothing was added"
        one, other = self._halves
        both = (one[0] + other[0], one[1] + other[1])
        root = _scale(both[0])

        def crossed(place: int) -> float:
            """The error under a penalty: fitted to each half, measured on the other."""
            fits = ((other, one), (one, other))
            return sum(_error(seen, _ridge(fitted, root, PENALTIES[place])).item() for seen, fitted in fits)

        best, error = _lowest(crossed, len(PENALTIES), LIKELY)
        correction = _ridge(both, root, PENALTIES[best])
        helps = error < 0 and all(_error(sums, correction) < 0 for sums in self._held_out)
        return correction if helps else torch.zeros_like(both[1])


def _lowest(error: Callable[[int], float], count: int, start: int) -> tuple[int, float]:
    """The place of the lowest of ``count`` errors, and it, downhill from ``start``: they fall, then they rise."""
    best, lowest = start, error(start)
    for step in (-1, 1):
        place = best + step
        while 0 <= place < count and (value := error(place)) < lowest:
            best, lowest, place = place, value, place + step
        if best != start:
            break
    return best, lowest


def _scale(gram_CC: Tensor) -> Tensor:
    weight = gram_CC.diagonal()
    tiny = torch.finfo(torch.float64).eps * weight.max().clamp(min=torch.finfo(torch.float64).tiny)
    return weight.clamp(min=tiny).sqrt()


def _ridge(sums: tuple[Tensor, Tensor], root_C: Tensor, penalty: float) -> Tensor:
    """The correction under a penalty, which is relative to the mean weight of the coordinates in these sums.

    By Cholesky: with so much on its diagonal a Gram matrix is well conditioned, and the few penalties that are tried
    cost less than one decomposition that would serve all.
    """
    gram_CC, cross_CD = sums
    scaled = gram_CC / root_C / root_C[:, None]
    mean = scaled.diagonal().mean().clamp(min=torch.finfo(scaled.dtype).eps)
    scaled.diagonal().add_(penalty * mean)
    return torch.cholesky_solve(cross_CD / root_C[:, None], torch.linalg.cholesky(scaled)) / root_C[:, None]


def _error(sums: tuple[Tensor, Tensor], correction_CD: Tensor) -> Tensor:
    """The squared error that ``correction`` leaves on these sums, less the error without it."""
    gram_CC, cross_CD = sums
    return (correction_CD * (gram_CC @ correction_CD - 2 * cross_CD)).sum()
