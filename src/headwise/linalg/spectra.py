"""Singular values of products of thin factors, plain and weighted by the second moments of their inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-10  # of the largest eigenvalue: what lies below is rounding


class Basis(NamedTuple):
    """Directions in order of weight. ``directions @ duals.mT`` is the identity; a few columns of both are a projection.

    ``values`` are singular values, ``directions`` and ``duals`` hold one direction per column.
    """

    values_NR: Tensor
    directions_NRR: Tensor
    duals_NRR: Tensor


def product_spectrum(left_NAR: Tensor, right_NBR: Tensor) -> Tensor:
    """Singular values of each ``left @ right.T``, from QR of both factors and an R x R core."""
    r_left = torch.linalg.qr(left_NAR.double(), mode="r").R
    r_right = torch.linalg.qr(right_NBR.double(), mode="r").R
    return torch.linalg.svdvals(r_left @ r_right.mT)


def moment_root(c_NRR: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root of second moments, and its inverse.

    By eigenvalues in float64, never by Cholesky: second moments of real inputs are nearly singular. Directions that
    never occur get the smallest weight that can still be inverted.
    """
    c = c_NRR.double()
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    largest = values[..., -1:]
    roots = values.clamp(min=SMALLEST * torch.where(largest > 0, largest, 1.0)).sqrt()
    return (vectors * roots[..., None, :]) @ vectors.mT, (vectors / roots[..., None, :]) @ vectors.mT


def weighted_spectrum(left_NRR: Tensor, right_NRR: Tensor) -> Tensor:
    """Singular values of ``left^1/2 right^1/2``.

    With the second moments of queries and keys: the singular values of their logits over the text. With the Gram matrix
    of the output weights and the second moment of summed values: those of the head's outputs.
    """
    return torch.linalg.svdvals(moment_root(left_NRR)[0] @ moment_root(right_NRR)[0])


def weighted_basis(left_NRR: Tensor, right_NRR: Tensor) -> Basis:
    """The basis in which ``y^T x`` (y of moment ``left``, x of ``right``) is best cut to any number of directions.

    Keeping the first r directions, ``x -> directions_r duals_r^T x``, has the least mean square error of all rank-r
    maps: the rest of the singular values.
    """
    root, inverse = moment_root(left_NRR)
    u, s, _ = torch.linalg.svd(root @ moment_root(right_NRR)[0])
    return Basis(s, inverse @ u, root @ u)


def dims_holding(s_NR: Tensor, share: float) -> Tensor:
    """Fewest leading singular values that hold ``share`` of the energy (sum of squares)."""
    energy = s_NR.double().square()
    held = energy.cumsum(dim=-1) / energy.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return (held < share * (1 - 1e-12)).sum(dim=-1).add(1).clamp(max=s_NR.shape[-1])
