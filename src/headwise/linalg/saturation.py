"""How sharp a softmax still is: the spectral norm of its Jacobian, row by row, without ever building it."""

from __future__ import annotations

import torch
from torch import Tensor

BISECTIONS = 40


def jacobian_norms(a_NL: Tensor) -> Tensor:
    """Spectral norm of ``diag(a) - a a^T`` for each row ``a`` that sums to 1 (masked entries are 0), exactly.

    The largest eigenvalue lies between the two largest entries and is the root of ``sum_i a_i / (a_i - x)`` there
    (secular equation of a rank-one change), so bisection finds it in O(L) per step; never above ``max a``.
    """
    a = a_NL.double()
    (largest, second), index = a.topk(2, dim=-1).values.unbind(-1), a.argmax(dim=-1, keepdim=True)
    others = a.scatter(-1, index, 0.0)
    low, high = second.clone(), largest.clone()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        terms = others / (middle[..., None] - others)
        below = largest / (largest - middle) < terms.sum(-1)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    tied = largest <= second  # the eigenvector is the difference of the two
    return torch.where(tied, largest, (low + high) / 2).to(a_NL.dtype)
