"""Spectra of products of thin factors, plain and weighted by the inputs a model really sees."""

from __future__ import annotations

import torch
from torch import Tensor


def product_spectrum(left_NAR: Tensor, right_NBR: Tensor) -> Tensor:
    """Singular values of each ``left @ right.T``, from QR of both factors and an R x R core."""
    r_left = torch.linalg.qr(left_NAR.double(), mode="r").R
    r_right = torch.linalg.qr(right_NBR.double(), mode="r").R
    return torch.linalg.svdvals(r_left @ r_right.mT)


def moment_root(c_DD: Tensor, shrinkage: float = 0.0) -> Tensor:
    """Symmetric square root of a second moment; ``shrinkage`` mixes in its mean diagonal, for few samples.

    By eigenvalues in float64, never by Cholesky: second moments of real inputs are nearly singular.
    """
    c = c_DD.double()
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    values = values.clamp(min=0) * (1 - shrinkage) + shrinkage * values.mean()
    return (vectors * values.sqrt()) @ vectors.mT


def dims_holding(s_NR: Tensor, share: float) -> Tensor:
    """Fewest leading singular values that hold ``share`` of the energy (sum of squares)."""
    energy = s_NR.double().square()
    held = energy.cumsum(dim=-1) / energy.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (held < share * (1 - 1e-12)).sum(dim=-1).add(1).clamp(max=s_NR.shape[-1])
