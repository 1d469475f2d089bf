"""Softmax saturation: the spectral norm of the Jacobian of each row, without building the Jacobian."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 4
NEGLIGIBLE = 1e-12
CHUNK = 1 << 17  # numbers worked on at once, so that temporaries stay in the processor's cache


def jacobian_norms(a_NL: Tensor) -> Tensor:
    """Spectral norm of ``diag(a) - a a^T`` for each row ``a`` that sums to 1 (masked entries are 0), exactly.

    The largest eigenvalue ``x`` lies between the two largest entries, where it solves the secular equation of a
    rank-one change, ``a_1 / (a_1 - x) = sum_{i>1} a_i / (x - a_i)``. Each step replaces the right-hand side by a
    constant and a pole at the second entry, with the same value and slope, and solves a quadratic: O(L) a step, and
    a handful of steps reach rounding error. The norm is never above ``max a``.
    """
    rows = a_NL.reshape(-1, a_NL.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    size = max(1, CHUNK // rows.shape[-1])
    norms = [_largest_eigenvalues(chunk) for chunk in rows.split(size)]
    return torch.cat(norms).view(a_NL.shape[:-1]).to(a_NL.dtype)


def _largest_eigenvalues(a: Tensor) -> Tensor:
    if a.shape[-1] == 1:
        return torch.zeros_like(a[:, 0])  # a softmax over one key is constant
    top, index = a.topk(2, dim=-1)
    largest = top[:, 0].clamp(min=torch.finfo(a.dtype).tiny)
    b = a / largest[:, None]  # the equation does not change when all entries are scaled
    b.scatter_(-1, index[:, :1], 0.0)
    second = b.gather(-1, index[:, 1:])[:, 0]
    gap = (1 - second).clamp(min=1e-9)
    rest = b.sum(-1)
    mean = b.square().sum(-1) / rest.clamp(min=torch.finfo(a.dtype).tiny)
    behind = second[:, None] - b
    # Distance of the eigenvalue from the second entry: kept by itself, or near-ties would be rounded away.
    least = 1e-6 * torch.minimum(gap, second) + NEGLIGIBLE
    ahead = start = torch.maximum((rest + mean) / (1 + rest) - second, 0.01 * torch.minimum(gap, second) + least)
    for _ in range(STEPS):
        distance = behind + ahead[:, None]
        terms = b / distance
        value, slope = terms.sum(-1), terms.div_(distance).sum(-1)
        weight = slope * ahead.square()
        constant = value - slope * ahead
        middle = 1 + weight - constant * gap
        root = (middle.square() + 4 * constant * weight * gap).clamp(min=0).sqrt()
        ahead = torch.minimum(torch.maximum(2 * weight * gap / (middle + root), least), gap)
    ahead = torch.where(second < NEGLIGIBLE, start, ahead)  # one key has it all
    return largest * (second + ahead).clamp(max=1.0)
