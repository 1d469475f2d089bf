"""Bases in which the keys and values of several key/value heads are kept as those of one.

RoPE turns the coordinates of one frequency by one angle, whichever head they belong to: as complex numbers, one for
each pair, they may be mixed across heads by any complex map. Keys without RoPE and values may be mixed by any real map.

Letters beside those of `headwise.linalg`: M merged heads, J heads joined in one, P RoPE pairs, F free key coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.linalg.spectra import Basis, weighted_basis

WEAKEST = 1e-4  # of the strongest query's size: what hardly asks is not left out altogether


class SharedMoments(NamedTuple):
    """Second moments across the heads of each block of neighbours: keys' pairs (complex), free keys, values."""

    pairs_MPJJ: Tensor
    free_MFF: Tensor
    values_MVV: Tensor


@dataclass(frozen=True, slots=True)
class SharedBasis:
    """Coordinates of merged heads, most energy first: ``coordinates = duals^T vector``, ``vector = directions them``.

    The pairs of each frequency have complex directions and duals, columns of which the dual ones are conjugated.
    """

    pair_directions_MPJJ: Tensor
    pair_duals_MPJJ: Tensor
    pair_energy_MPJ: Tensor
    free: Basis
    values: Basis

    def units(self, k_MJNK: Tensor, grad_MJNK: Tensor) -> Tensor:
        """What each key unit carries times the gradient there, (M, N, U): pairs by frequency, then free directions."""
        P = self.pair_energy_MPJ.shape[1]
        duals, directions = (
            t.to(k_MJNK.device, torch.complex64) for t in (self.pair_duals_MPJJ, self.pair_directions_MPJJ)
        )
        key, grad = (as_complex(x[..., : 2 * P]) for x in (k_MJNK, grad_MJNK))
        carried = torch.einsum("mpjc,mjnp->mnpc", duals.conj(), key)
        felt = torch.einsum("mpjc,mjnp->mnpc", directions.conj(), grad)
        pairs = (felt.conj() * carried).real.flatten(2)
        free = _products(self.free, *(together(x[..., 2 * P :]) for x in (k_MJNK, grad_MJNK)))
        return torch.cat((pairs, free), dim=-1)

    def value_units(self, v_MJNV: Tensor, grad_MJNV: Tensor) -> Tensor:
        """The same of each value direction, (M, N, J V)."""
        return _products(self.values, together(v_MJNV), together(grad_MJNV))


def shared_moments(k_MJNK: Tensor, v_MJNV: Tensor, rotary: int) -> SharedMoments:
    """Sums over N rows (tokens, or the inputs of weights) of products between the heads of each block."""
    pairs = as_complex(k_MJNK.double()[..., :rotary])
    free, values = together(k_MJNK.double()[..., rotary:]), together(v_MJNV.double())
    return SharedMoments(torch.einsum("mjnp,minp->mpji", pairs, pairs.conj()), free.mT @ free, values.mT @ values)


def split_blocks(moments: SharedMoments, joined: int) -> SharedMoments:
    """The moments of smaller blocks, ``joined`` neighbours each, out of those of larger ones."""
    J = moments.pairs_MPJJ.shape[-1]
    pairs = _diagonal_blocks(moments.pairs_MPJJ.movedim(1, -1), J // joined).movedim(-1, 1)
    free, values = (_diagonal_blocks(m, J // joined) for m in (moments.free_MFF, moments.values_MVV))
    return SharedMoments(pairs, free, values)


def shared_basis(moments: SharedMoments, query_GKK: Tensor, out_GVV: Tensor) -> SharedBasis:
    """The basis in which to cut merged heads whose queries have these second moments, and outputs these Gram matrices.

    Both are those of all query heads of a key/value head added up.
    """
    M, P, J, _ = moments.pairs_MPJJ.shape
    energy_GP = query_GKK.double().diagonal(dim1=-2, dim2=-1)[:, : 2 * P].unflatten(-1, (2, P)).sum(1)
    weight_MPJ = energy_GP.sqrt().unflatten(0, (M, J)).mT
    strongest = weight_MPJ.flatten(1).amax(-1)[:, None, None] if P else weight_MPJ.new_ones(M, 1, 1)
    weight_MPJ = weight_MPJ.clamp(min=WEAKEST * torch.where(strongest > 0, strongest, 1.0))
    values, vectors = torch.linalg.eigh(weight_MPJ[..., None] * moments.pairs_MPJJ * weight_MPJ[..., None, :])
    vectors = vectors.flip(-1)
    free = weighted_basis(_side_by_side(query_GKK.double()[:, 2 * P :, 2 * P :], M), moments.free_MFF)
    return SharedBasis(
        pair_directions_MPJJ=vectors / weight_MPJ[..., None],
        pair_duals_MPJJ=vectors * weight_MPJ[..., None],
        pair_energy_MPJ=values.flip(-1).clamp(min=0),
        free=free,
        values=weighted_basis(_side_by_side(out_GVV.double(), M), moments.values_MVV),
    )


def as_complex(x: Tensor) -> Tensor:
    """Coordinates ``p`` and ``p + P`` of the last axis as one complex number."""
    return torch.complex(*x.chunk(2, dim=-1))


def as_real(z: Tensor) -> Tensor:
    """The way back."""
    return torch.cat((z.real, z.imag), dim=-1)


def together(x_MJNC: Tensor) -> Tensor:
    """All heads of each block side by side, (M, N, J C)."""
    return x_MJNC.transpose(1, 2).flatten(2)


def _products(basis: Basis, x_MNC: Tensor, grad_MNC: Tensor) -> Tensor:
    directions, duals = (t.to(x_MNC) for t in (basis.directions_NRR, basis.duals_NRR))
    return (x_MNC @ duals) * (grad_MNC @ directions)


def _diagonal_blocks(x_MCC: Tensor, count: int) -> Tensor:
    """(M, C, C, ...) as (M count, C / count, C / count, ...)."""
    C = x_MCC.shape[1] // count
    parts = [x_MCC[:, i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(count)]
    return torch.stack(parts, dim=1).flatten(0, 1)


def _side_by_side(x_GCC: Tensor, merged: int) -> Tensor:
    """(G, C, C) as (M, J C, J C), the matrices of the heads of a block on its diagonal."""
    return torch.stack([torch.block_diag(*block) for block in x_GCC.unflatten(0, (merged, -1))])
