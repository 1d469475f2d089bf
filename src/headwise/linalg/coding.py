"""The coordinates in which keys and values are rounded, and the levels each coordinate is rounded to.

A cache reads ``y = directions z`` with every coordinate of ``z = duals^T y`` rounded on its own. Which coordinates are
best is transform coding: noise in ``z_i`` costs half its power times the mean square gradient along
``directions_i``, so the metric is the second moment of the gradients and the source the covariance of ``y``. Gradients
are heavy-tailed: a few tokens would decide unless they are clipped and the metric is shrunk towards a round one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.linalg.spectra import Basis, moment_root
from headwise.records.packing import WHOLE_BITS

CLIP = 0.98  # gradients longer than this share of all others are cut to that length
ROUND = 0.5  # of the mean eigenvalue, added to the metric
SMALL = 1e-3  # of the mean variance, added to the source
FLAT = (
    1e-6  # of the largest eigenvalue: coordinates that hold less are never filled, and scaled as if they held so much
)
POINTS = 1024  # that stand for all samples of a coordinate
STEPS = 16  # of the fit of levels: each assigns the samples and solves for the levels
FIRM = 1e-4  # pull of the last levels on the next ones
WIDE = (1.2, 5.0)  # cubic parts of levels that reach every number
BYTE = 8
FINE = 2**4  # levels, from which on such are tried
REACH = 1.5  # of 256 levels, in units of the longest sample
WHOLE_REACH = 8.0  # the same of 2^16 levels


def clipped(gradient_NGC: Tensor) -> Tensor:
    """Gradients (tokens, heads, coordinates) with the longest of each head cut to the length that most stay below."""
    length_NG = gradient_NGC.norm(dim=-1)
    longest_G = length_NG.float().quantile(CLIP, dim=0)
    return gradient_NGC * (longest_G / length_NG.clamp(min=torch.finfo(length_NG.dtype).tiny)).clamp(max=1)[..., None]


def coding_basis(
    source_NRR: Tensor, metric_NRR: Tensor, sizes: Sequence[int] = (), weights_NRD: Tensor | None = None
) -> Basis:
    """The basis to round in, most important coordinate first: all have the same variance.

    Where R is several parts of other units (keys and values), each of its own ``sizes`` is shrunk towards its own mean.
    What a text did not show may lie anywhere, or, where a product with ``weights`` makes the numbers, anywhere in their
    span: then coordinates beyond it hold nothing, whatever comes.
    """
    source, metric = source_NRR.double(), metric_NRR.double()
    tiny = torch.finfo(torch.float64).tiny
    root, inverse = moment_root(metric + torch.diag_embed(ROUND * _means(metric, sizes) + tiny))
    if weights_NRD is None:
        unseen = torch.diag_embed(_means(source, sizes))
    else:
        span = weights_NRD.double() @ weights_NRD.double().mT
        unseen = span * (_trace(source) / _trace(span).clamp(min=tiny))[:, None, None]
    values, vectors = torch.linalg.eigh(root @ (source + SMALL * unseen) @ root)
    values, vectors = values.flip(-1), vectors.flip(-1)
    scale = torch.maximum(values, FLAT * values[..., :1]).clamp(min=tiny).sqrt()[..., None, :]
    return Basis(scale[..., 0, :], inverse @ vectors * scale, root @ vectors / scale)


def paired_basis(source_NRR: Tensor, *, neighbours: bool = False) -> Tensor:
    """Rotations of pairs ``(p, p + R/2)`` onto the axes of their own covariance, (N, R, R): they commute with RoPE.

    Or of pairs ``(2p, 2p + 1)``, of ``neighbours``.
    """
    half = source_NRR.shape[-1] // 2
    first, second = torch.arange(2 * half).view((half, 2) if neighbours else (2, half)).unbind(1 if neighbours else 0)
    source = source_NRR.double()
    angle_NP = 0.5 * torch.atan2(2 * source[:, first, second], source[:, first, first] - source[:, second, second])
    turn = torch.zeros_like(source)
    turn[:, first, first] = turn[:, second, second] = angle_NP.cos()
    turn[:, second, first] = angle_NP.sin()
    turn[:, first, second] = -angle_NP.sin()
    return turn


def importance(basis: Basis, source_NRR: Tensor, metric_NRR: Tensor) -> Tensor:
    """What losing each coordinate would cost, were its errors independent of token and gradient: (N, R)."""
    felt = (basis.directions_NRR * (metric_NRR.double() @ basis.directions_NRR)).sum(-2)
    power = (basis.duals_NRR * (source_NRR.double() @ basis.duals_NRR)).sum(-2)
    return (felt * power / 2).clamp(min=0)


def fit_levels(samples_NC: Tensor, bits: int) -> Tensor:
    """Offset, scale and cubic part of the ``2**bits`` levels that round each column of ``samples_NC`` best: (C, 3).

    Level ``c`` is ``offset + scale (u + cubic u^3)`` with ``u`` from -1 to 1: Lloyd's algorithm with levels that three
    numbers describe. They are fitted to samples of mean 0 and variance 1 and scaled back.
    """
    mean, spread = samples_NC.mean(0), samples_NC.std(0).clamp(min=1e-6)
    if not bits:
        return torch.stack((mean, torch.ones_like(mean), torch.zeros_like(mean)), dim=-1)
    x_NC = (samples_NC - mean) / spread
    longest_C = x_NC.abs().amax(0)
    if bits == WHOLE_BITS:
        return torch.stack((mean, WHOLE_REACH * spread * longest_C, torch.zeros_like(mean)), dim=-1)
    x_CN, u_K = _condensed(x_NC), level_places(bits).to(samples_NC)
    basis_KP = torch.stack([torch.ones_like(u_K), u_K, u_K**3][: 2 if bits == 1 else 3], dim=-1)
    solution = _first_levels(x_CN, basis_KP, longest_C)
    pull = FIRM * x_CN.shape[1] * torch.eye(basis_KP.shape[1]).to(x_CN)
    for _ in range(0 if bits == BYTE else STEPS):
        levels_CK, codes_CN = _nearest(x_CN, basis_KP, solution)
        counts, totals = torch.zeros_like(levels_CK), torch.zeros_like(levels_CK)
        counts.scatter_add_(1, codes_CN, torch.ones_like(x_CN))
        totals.scatter_add_(1, codes_CN, x_CN)
        left = torch.einsum("kp,ck,kq->cpq", basis_KP, counts, basis_KP) + pull
        right = totals @ basis_KP + solution @ pull
        solution = torch.linalg.solve(left, right)
    offset, scale = solution[:, 0], solution[:, 1].clamp(min=1e-4)
    cubic = torch.zeros_like(scale) if bits == 1 else (solution[:, 2] / scale).clamp(min=-1 / 3, max=1e3)
    return torch.stack((mean + spread * offset, spread * scale, cubic), dim=-1)


def _first_levels(x_CN: Tensor, basis_KP: Tensor, longest_C: Tensor) -> Tensor:
    """The levels (C, P) to start from: those of a normal variable, or such as reach every number where that is better.

    Steps only lead to the next optimum: where frequent tokens stand apart from all others, as they do in first layers,
    levels of a normal variable would never get there. Of 256 levels the noise is next to nothing, and what is cut off
    of rare tokens would be most of the error: all of them reach farther than any sample.
    """
    count = len(basis_KP)
    zero = torch.zeros_like(longest_C)
    reach = REACH if count == 2**BYTE else 1.0
    starts = [reach * torch.stack((zero, longest_C, cubic * longest_C), dim=-1) / (1 + cubic) for cubic in WIDE]
    if count < 2**BYTE:
        # Many levels are best as dense as the cube root of the density: for a normal one, of three times the variance.
        normal = 3**0.5 * torch.special.ndtri((torch.arange(count) + 0.5) / count).to(x_CN)
        usual = torch.linalg.lstsq(basis_KP, normal[:, None]).solution[:, 0].expand(len(x_CN), -1)
        starts = [usual, *starts] if count >= FINE else [usual]
    errors = []
    for start in starts:
        levels_CK, codes_CN = _nearest(x_CN, basis_KP, start)
        errors.append((x_CN - levels_CK.gather(1, codes_CN)).square().sum(1))
    return torch.stack(starts)[torch.stack(errors).argmin(0), torch.arange(len(x_CN), device=x_CN.device)]


def _nearest(x_CN: Tensor, basis_KP: Tensor, solution_CP: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (C, K), and the number of that nearest to each sample (C, N)."""
    levels_CK = (solution_CP @ basis_KP.T).cummax(-1).values
    middles = (levels_CK[:, 1:] + levels_CK[:, :-1]) / 2
    return levels_CK, torch.searchsorted(middles.contiguous(), x_CN)


def _condensed(samples_NC: Tensor) -> Tensor:
    """Each column as at most so many means of neighbouring samples, (C, n): levels come out the same, sooner."""
    group = max(1, len(samples_NC) // POINTS)
    kept = samples_NC.sort(dim=0).values[: len(samples_NC) // group * group]
    return kept.unflatten(0, (-1, group)).mean(1).T.contiguous()


def level_places(bits: int) -> Tensor:
    """Where the levels of a coordinate stand between -1 and 1 before they are bent."""
    last = 2**bits - 1
    return (2 * torch.arange(last + 1, dtype=torch.float32) - last) / max(1, last)


def _trace(moment_NRR: Tensor) -> Tensor:
    return moment_NRR.diagonal(dim1=-2, dim2=-1).sum(-1)


def _means(moment_NRR: Tensor, sizes: Sequence[int]) -> Tensor:
    """For each coordinate the mean diagonal element of its part, (N, R)."""
    parts = moment_NRR.diagonal(dim1=-2, dim2=-1).split(list(sizes) or moment_NRR.shape[-1], dim=-1)
    return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], dim=-1)
