"""Ranks of attention maps: hard, numerical, effective, stable. All but the first from one set of singular values."""

from __future__ import annotations

import torch
from torch import Tensor


def hard_rank(a_NTS: Tensor) -> Tensor:
    """Distinct columns that are the argmax of some row: the rank the map would have at zero temperature."""
    winners = a_NTS.argmax(dim=-1)
    chosen = torch.zeros(a_NTS.shape[:-2] + a_NTS.shape[-1:], dtype=torch.bool, device=a_NTS.device)
    return chosen.scatter(-1, winners, True).sum(dim=-1)


def singular_values(a_NTS: Tensor) -> Tensor:
    """Singular values, largest first, from the Gram matrix of the rows in float64: several times faster than an SVD.

    Values below about 1e-8 of the largest are lost in rounding; tolerances for ranks lie far above that.
    """
    a = a_NTS.double()
    squares = torch.linalg.eigvalsh(a @ a.mT).flip(-1)
    return squares.clamp(min=0).sqrt()


def numerical_rank(s_NR: Tensor, tolerance: float) -> Tensor:
    """Singular values above ``tolerance`` times the largest."""
    return (s_NR > tolerance * s_NR[..., :1]).sum(dim=-1)


def effective_rank(s_NR: Tensor) -> Tensor:
    """Exponential of the entropy of the normalised singular values (Roy & Vetterli 2007)."""
    share = s_NR / s_NR.sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1).exp()


def stable_rank(s_NR: Tensor) -> Tensor:
    """Squared Frobenius norm over squared spectral norm."""
    return s_NR.square().sum(dim=-1) / s_NR[..., 0].square()
