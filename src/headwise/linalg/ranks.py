"""Ranks of attention maps: hard, numerical, effective, stable. All but the first from one set of singular values."""

from __future__ import annotations

import torch
from torch import Tensor


def hard_rank(winners_NT: Tensor, columns: int) -> Tensor:
    """Distinct columns among the argmax columns of a map's rows: the rank it would have at zero temperature."""
    chosen = torch.zeros((*winners_NT.shape[:-1], columns), dtype=torch.bool, device=winners_NT.device)
    return chosen.scatter(-1, winners_NT, True).sum(dim=-1)


def gram_singular_values(a_NTS: Tensor) -> Tensor:
    """Singular values, largest first, from the Gram matrix of the shorter side in float64: faster than an SVD.

    Values below about 1e-8 of the largest are lost in rounding; tolerances for ranks lie far above that.
    """
    a = a_NTS.double()
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    return torch.linalg.eigvalsh(gram).flip(-1).clamp(min=0).sqrt()


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
