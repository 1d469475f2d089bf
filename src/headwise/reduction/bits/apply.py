"""Attention weights whose keys come out in the coordinates in which they are rounded: the same function."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headwise.families.weights import AttentionWeights
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.bits.change import Bits


def apply(
    weights: AttentionWeights, change: Bits, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights:
    """The weights with turned keys; without ``statistics``, behind a cut or behind a norm they stay as they are."""
    tensors = {} if statistics is None else statistics.tensors
    directions, duals = tensors.get("k_code_directions"), tensors.get("k_code_duals")
    if weights.latent is not None:
        if directions is None or duals is None:
            return weights
        return replace(weights, latent=weights.latent.turned(directions[0], duals[0]))
    if not _fits(directions, weights.w_k_GKD) or weights.norm_k is not None:
        return weights
    return replace(
        weights,
        w_q_HKD=_mixed(weights.w_q_HKD, directions),
        b_q_HK=_mixed_bias(weights.b_q_HK, directions),
        w_k_GKD=_mixed(weights.w_k_GKD, duals),
        b_k_GK=_mixed_bias(weights.b_k_GK, duals),
    )


def _fits(basis_GCC: Tensor | None, w_GCD: Tensor) -> bool:
    return basis_GCC is not None and basis_GCC.shape[:2] == w_GCD.shape[:2]


def _mixed(w_NCD: Tensor, basis_GCC: Tensor | None) -> Tensor:
    """Rows of each head mixed by the columns of its group's basis, in double precision."""
    if basis_GCC is None:
        return w_NCD
    basis = basis_GCC.double().to(w_NCD.device).repeat_interleave(len(w_NCD) // len(basis_GCC), dim=0)
    return (basis.mT @ w_NCD.double()).to(w_NCD.dtype)


def _mixed_bias(b_NC: Tensor | None, basis_GCC: Tensor | None) -> Tensor | None:
    return None if b_NC is None else _mixed(b_NC[..., None], basis_GCC)[..., 0]
