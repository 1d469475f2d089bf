"""The weights of attention that reads latents, and the keys and values that these stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise.records.shape import AbsorbedShape
from headwise.runtime.absorbed_attention import AbsorbedAttention, NoPairs


@dataclass(frozen=True, slots=True)
class AbsorbedWeights:
    """What a layer of `AbsorbedAttention` has instead of projections of keys and values.

    Letters as there: M blocks, P cached pairs (their real parts, then the imaginary ones), R latent, F coordinates of
    a key that have no position. ``places_MP`` says which RoPE pair of a query each cached pair meets.
    """

    w_pairs_MCD: Tensor
    w_latent_MRD: Tensor
    factors_2GP: Tensor
    key_maps_GFR: Tensor
    value_maps_GRV: Tensor
    shift_GV: Tensor
    places_MP: Tensor
    b_pairs_MC: Tensor | None = None
    b_latent_MR: Tensor | None = None

    def keys(self, pairs: int) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of the keys of every head, (G, 2N + F, D), for ``pairs`` RoPE pairs N of a query."""
        G, M = self.factors_2GP.shape[1], len(self.places_MP)
        per_block = [t.repeat_interleave(G // M, dim=0) for t in (self.places_MP, self.w_pairs_MCD, self.w_latent_MRD)]
        places_GP, w_pairs, w_latent = per_block
        met = nn.functional.one_hot(places_GP, max(pairs, 1))[..., :pairs].to(self.factors_2GP)
        real, imaginary = (part[..., None] * met for part in self.factors_2GP)
        maps = torch.cat((torch.cat((real, imaginary), -1), torch.cat((-imaginary, real), -1)), dim=-2)
        weight = torch.cat((maps.mT @ w_pairs, self.key_maps_GFR @ w_latent), dim=1)
        biases = (self.b_pairs_MC, self.b_latent_MR)
        if all(bias is None for bias in biases):
            return weight, None
        parts = []
        for bias, along in zip(biases, (maps.mT, self.key_maps_GFR), strict=True):
            none = along.new_zeros(along.shape[:2])
            parts.append(none if bias is None else (along @ bias.repeat_interleave(G // M, dim=0)[..., None])[..., 0])
        return weight, torch.cat(parts, dim=-1)

    def values(self) -> tuple[Tensor, Tensor]:
        """Weights and biases of the values of every head, (G, V, D) and (G, V)."""
        J = len(self.shift_GV) // len(self.places_MP)
        maps = self.value_maps_GRV.mT
        bias = self.shift_GV
        if self.b_latent_MR is not None:
            bias = bias + (maps @ self.b_latent_MR.repeat_interleave(J, dim=0)[..., None])[..., 0]
        return maps @ self.w_latent_MRD.repeat_interleave(J, dim=0), bias


def is_absorbed(module: Any) -> bool:
    """Whether an attention module reads latents."""
    return isinstance(module, AbsorbedAttention)


def absorbed_shape(module: Any) -> AbsorbedShape | None:
    """What such a module caches; None of any other."""
    if not is_absorbed(module):
        return None
    return AbsorbedShape(module.joined, module.cached_rope_pairs.shape[1], module.value_maps.shape[1])


def read_absorbed(module: Any, pairs: nn.Module, latent: nn.Module) -> AbsorbedWeights:
    """The weights of such a module whose projections are ``pairs`` and ``latent``."""
    M = module.cached_heads
    bias = cast(Tensor | None, latent.bias)
    w_latent = cast(Tensor, latent.weight).unflatten(0, (M, -1))
    empty = isinstance(pairs, NoPairs)
    b_pairs = None if empty else cast(Tensor | None, pairs.bias)
    w_pairs = w_latent[:, :0] if empty else cast(Tensor, pairs.weight).unflatten(0, (M, -1))
    rope_pairs = module.rope_pairs[0]
    places = torch.searchsorted(rope_pairs, module.cached_rope_pairs).clamp(max=max(0, len(rope_pairs) - 1))
    return AbsorbedWeights(
        w_pairs,
        w_latent,
        module.factors,
        module.key_maps,
        module.value_maps,
        module.value_shift,
        places,
        None if b_pairs is None else b_pairs.unflatten(0, (M, -1)),
        None if bias is None else bias.unflatten(0, (M, -1)),
    )
