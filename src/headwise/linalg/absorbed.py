"""Coordinates of a cache that is read without rebuilding keys and values.

Of a block of key/value heads every RoPE frequency has coordinates that are complex mixtures of its heads: they turn as
the pairs do. Everything without a position, keys and values alike, shares one real basis. Both come from the second
moments of what the block would cache, keys before RoPE, and of the gradients there (see `headwise.linalg.coding`).

Letters beside those of `headwise.linalg`: M blocks, J heads of a block, W = J (K + V) numbers of a block (keys of all
its heads, then values), P RoPE pairs, L of the W numbers that have no position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.linalg.coding import ROUND, SMALL, coding_basis
from headwise.linalg.spectra import Basis

RANGE = 1e-10  # of the strongest: what lies below is rounding


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the numbers of a block stand: ``joined`` heads of ``qk_dim`` with ``rotary``, then as many of ``v_dim``."""

    joined: int
    qk_dim: int
    v_dim: int
    rotary: int

    def pairs(self) -> Tensor:
        """Real parts of each pair in every head, then imaginary ones: (P, 2 J)."""
        half = self.rotary // 2
        heads = torch.arange(self.joined) * self.qk_dim
        place = torch.arange(half)[:, None] + heads
        return torch.cat((place, place + half), dim=1)

    def keys(self, free: tuple[int, ...]) -> Tensor:
        """Numbers of each head's key without a position, (J, F): pairs in ``free``, then those RoPE never turned."""
        half, pairs = self.rotary // 2, torch.tensor(free, dtype=torch.long)
        within = torch.cat((pairs, pairs + half, torch.arange(self.rotary, self.qk_dim)))
        return torch.arange(self.joined)[:, None] * self.qk_dim + within

    def values(self) -> Tensor:
        """Numbers of each head's value, (J, V)."""
        return self.joined * self.qk_dim + torch.arange(self.joined * self.v_dim).view(self.joined, -1)

    def latent(self, free: tuple[int, ...]) -> Tensor:
        """All numbers without a position, (L,): keys, then values."""
        return torch.cat((self.keys(free).flatten(), self.values().flatten()))


class Moments(NamedTuple):
    """Of what blocks cache its mean and second moment, and second moments of clipped gradients.

    Gradients as they are, of which a few tokens have most, choose worse what to leave out.
    """

    mean_MW: Tensor
    second_MWW: Tensor
    clipped_MWW: Tensor


class PairBasis(NamedTuple):
    """Complex coordinates of each frequency, ``dual^H`` keys, most important first, and what losing each would cost."""

    directions_MPJJ: Tensor
    duals_MPJJ: Tensor
    importance_MPJ: Tensor


def pair_basis(moments: Moments, layout: BlockLayout) -> PairBasis:
    """The coordinates of all RoPE pairs."""
    rows, J = layout.pairs(), layout.joined
    second, clipped = (
        m.double()[:, rows[:, :, None], rows[:, None, :]] for m in (moments.second_MWW, moments.clipped_MWW)
    )
    source, metric = _shrunk(_complex(second, J), SMALL), _shrunk(_complex(clipped, J), ROUND)
    root, inverse = _complex_root(metric)
    values, vectors = torch.linalg.eigh(root @ source @ root)
    scale = values.flip(-1).clamp(min=torch.finfo(torch.float64).tiny).sqrt()[..., None, :]
    vectors = vectors.flip(-1)
    directions, duals = inverse @ vectors * scale, root @ vectors / scale
    parts = torch.einsum("mpjc,mpic->mpcji", directions, duals.conj())
    real = torch.cat((torch.cat((parts.real, -parts.imag), -1), torch.cat((parts.imag, parts.real), -1)), -2)
    moved = real @ second[:, :, None] @ real.mT
    importance = (clipped[:, :, None] * moved).sum((-1, -2)) / 2
    order = importance.argsort(dim=-1, descending=True)
    directions, duals = (t.gather(-1, order[:, :, None].expand_as(t).contiguous()) for t in (directions, duals))
    return PairBasis(directions, duals, importance.gather(-1, order).clamp(min=0))


def latent_basis(moments: Moments, layout: BlockLayout, free: tuple[int, ...], weights_MWD: Tensor) -> Basis:
    """The coordinates of everything without a position, most important first; its values are what losing each costs.

    There are only as many as the weights that it comes from (with biases) can tell apart.
    """
    rows = layout.latent(free)
    centred = moments.second_MWW - moments.mean_MW[:, :, None] * moments.mean_MW[:, None]
    source, clipped = (m.double()[:, rows[:, None], rows] for m in (centred, moments.clipped_MWW))
    keys = layout.keys(free).numel()
    sizes = (keys, len(rows) - keys)
    floor = torch.diag_embed(_means(clipped, sizes)) * ROUND
    span = _range(weights_MWD.double()[:, rows])
    basis = coding_basis(span.mT @ source @ span, span.mT @ (clipped + floor) @ span)
    directions, duals = span @ basis.directions_NRR, span @ basis.duals_NRR
    power = (duals * (source @ duals)).sum(-2)
    importance = ((directions * (clipped @ directions)).sum(-2) * power / 2).clamp(min=0)
    order = importance.argsort(dim=-1, descending=True)
    directions, duals = (t.gather(-1, order[:, None].expand_as(t)) for t in (directions, duals))
    return Basis(importance.gather(-1, order), directions, duals)


def _means(moment_NRR: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = moment_NRR.diagonal(dim1=-2, dim2=-1).split(list(sizes), dim=-1)
    return torch.cat([part.mean(-1, keepdim=True).expand_as(part) if part.shape[-1] else part for part in parts], -1)


def _range(weights_MLD: Tensor) -> Tensor:
    """An orthonormal basis of what comes out of ``weights_MLD``, (M, L, r), with the r of the block that has most."""
    left, values, _ = torch.linalg.svd(weights_MLD, full_matrices=False)
    rank = int((values > RANGE**0.5 * values[:, :1]).sum(-1).max())
    return left[..., :rank]


def _complex(real: Tensor, heads: int) -> Tensor:
    """Moments of real and imaginary parts as those of complex numbers."""
    rr, ri = real[..., :heads, :heads], real[..., :heads, heads:]
    ir, ii = real[..., heads:, :heads], real[..., heads:, heads:]
    return torch.complex(rr + ii, ir - ri)


def _shrunk(moment: Tensor, share: float) -> Tensor:
    mean = moment.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    weight = share * mean + torch.finfo(torch.float64).tiny ** 0.5
    return moment + weight[..., None, None] * torch.eye(moment.shape[-1], dtype=moment.dtype)


def _complex_root(moment: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(moment)
    roots = values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()[..., None, :]
    return vectors * roots @ vectors.mH, vectors / roots @ vectors.mH
