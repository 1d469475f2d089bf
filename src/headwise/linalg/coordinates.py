"""The coordinates of a head that are kept or cut one by one: whole RoPE pairs, and free directions.

RoPE turns each pair by its own frequency, so pairs stay whole and are never mixed; coordinates without RoPE
may be rotated freely, and are, into the basis that is best to truncate. A *unit* is a pair or a free direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.linalg.spectra import Basis, weighted_basis


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pairs and the free coordinates of a head stand in its queries and keys."""

    pairs_P2: Tensor
    free_F: Tensor

    @classmethod
    def halves(cls, start: int, rotary: int, qk_dim: int) -> Layout:
        """Pair p in coordinates ``start + p`` and ``start + p + rotary / 2``, as most models lay them out."""
        first = torch.arange(start, start + rotary // 2)
        return cls._with_free(torch.stack((first, first + rotary // 2), dim=1), qk_dim)

    @classmethod
    def neighbours(cls, start: int, rotary: int, qk_dim: int) -> Layout:
        """Pair p in coordinates ``start + 2p`` and the next."""
        return cls._with_free(torch.arange(start, start + rotary).view(-1, 2), qk_dim)

    @classmethod
    def _with_free(cls, pairs_P2: Tensor, qk_dim: int) -> Layout:
        free = torch.ones(qk_dim, dtype=torch.bool)
        free[pairs_P2.flatten()] = False
        return cls(pairs_P2, free.nonzero()[:, 0])


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a layer's keys, one list for each key/value head: pairs first, then free directions by weight.

    ``energy_GU`` is the root mean square each unit adds to a logit.
    """

    layout: Layout
    free: Basis
    energy_GU: Tensor

    @property
    def dims_U(self) -> Tensor:
        """Coordinates of each unit."""
        return torch.tensor([2] * len(self.layout.pairs_P2) + [1] * len(self.layout.free_F))

    def parts(self, q_NGTK: Tensor, k_NGTK: Tensor) -> Tensor:
        """For each unit its part of ``q . k``, token by token: (N, G, T, U)."""
        pairs = self.layout.pairs_P2.to(k_NGTK.device)
        free = self.layout.free_F.to(k_NGTK.device)
        turned = (q_NGTK * k_NGTK)[..., pairs].sum(-1)
        directions, duals = (t.to(k_NGTK) for t in (self.free.directions_NRR, self.free.duals_NRR))
        return torch.cat((turned, (q_NGTK[..., free] @ directions) * (k_NGTK[..., free] @ duals)), dim=-1)

    def projector(self, kept_GU: Tensor) -> Tensor:
        """The (G, K, K) matrix that keeps the units marked in ``kept_GU`` of a key (column vector)."""
        G, P = kept_GU.shape[0], len(self.layout.pairs_P2)
        K = 2 * P + len(self.layout.free_F)
        projector = torch.zeros(G, K, K, dtype=torch.float64)
        for coordinate in self.layout.pairs_P2.T:
            projector[:, coordinate, coordinate] = kept_GU[:, :P].double()
        free = self.layout.free_F
        kept = self.free.directions_NRR * kept_GU[:, None, P:].double() @ self.free.duals_NRR.mT
        projector[:, free[:, None], free] = kept
        return projector

    def strongest(self, width: int) -> Tensor:
        """Marks (G, U) of the units with most energy per coordinate that fit into ``width`` coordinates."""
        dims = self.dims_U.double()
        order = (self.energy_GU.square() / dims).argsort(dim=-1, descending=True)
        taken = dims[order].cumsum(-1) <= width
        return torch.zeros_like(taken).scatter(-1, order, taken)


def key_units(q_moment_GKK: Tensor, k_moment_GKK: Tensor, layout: Layout) -> Units:
    """The units of keys with (centred) second moment ``k_moment`` that meet queries of second moment ``q_moment``."""
    pairs, free = layout.pairs_P2, layout.free_F
    q_pairs, k_pairs = (m[:, pairs[:, :, None], pairs[:, None, :]] for m in (q_moment_GKK, k_moment_GKK))
    turned_GP = (q_pairs * k_pairs.mT).sum((-1, -2)).clamp(min=0).sqrt()
    blocks = (m[:, free[:, None], free] for m in (q_moment_GKK, k_moment_GKK))
    basis = weighted_basis(*blocks)
    return Units(layout, basis, torch.cat((turned_GP, basis.values_NR), dim=-1))
