"""Latent attention (MLA): the projections in which the key that all heads share can be turned.

Letters: H heads, K query/key width, C inputs of the last projection of queries, R coordinates that RoPE turns, which
stand last in queries, L what comes out of the projection that makes the latent and the shared key, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from headwise.families.sites import Site, base_type


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The last projection of queries, and what makes the latent (first) and the shared key (last) of a token.

    ``order_R`` lists the rows of the shared key as the cache holds them.
    """

    w_q_HKC: Tensor
    w_down_LD: Tensor
    b_down_L: Tensor | None
    order_R: Tensor

    def turned(self, directions_RR: Tensor, duals_RR: Tensor) -> LatentWeights:
        """The same attention with the coordinates of ``directions`` as the cached ones of the shared key."""
        bias = None if self.b_down_L is None else self._mixed(self.b_down_L[:, None], duals_RR)[:, 0]
        return replace(
            self,
            w_q_HKC=self._mixed(self.w_q_HKC, directions_RR),
            w_down_LD=self._mixed(self.w_down_LD, duals_RR),
            b_down_L=bias,
        )

    def _mixed(self, rows: Tensor, basis_RR: Tensor) -> Tensor:
        """The last R of ``rows`` (..., rows, inputs) mixed by the columns of a basis, in double precision."""
        order, R = self.order_R.to(rows.device), len(self.order_R)
        mixed = basis_RR.double().to(rows.device).mT @ rows[..., -R:, :][..., order, :].double()
        return torch.cat((rows[..., :-R, :], mixed[..., order.argsort(), :].to(rows.dtype)), dim=-2)


def last_queries(module: Any) -> Any:
    """The projection that queries come out of."""
    return module.q_b_proj if module.q_lora_rank is not None else module.q_proj


def read_latent(site: Site) -> LatentWeights:
    """What of the latent attention at ``site`` a plan may change."""
    module = site.module
    down = module.kv_a_proj_with_mqa
    queries = last_queries(module).weight.unflatten(0, (module.num_heads, -1))
    return LatentWeights(queries, down.weight, down.bias, cached_order(module.config))


def cached_order(config: Any) -> Tensor:
    """The rows of the shared key in the order in which the cache holds them; V3 may sort neighbours into halves."""
    rows = torch.arange(config.qk_rope_head_dim)
    return rows.view(-1, 2).T.flatten() if getattr(config, "rope_interleave", False) else rows


def caches_neighbours(config: PreTrainedConfig) -> bool:
    """Whether the two coordinates of a RoPE pair are neighbours in the cache."""
    return base_type(config) == "deepseek_v2"
