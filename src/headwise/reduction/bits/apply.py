"""Attention weights whose keys and values come out in the coordinates in which they are rounded: the same function."""

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
    """The weights with the bases of ``statistics`` folded in; without any, or behind a cut, those of the model stay."""
    tensors = {} if statistics is None else statistics.tensors
    directions = [tensors.get(f"{part}_code_directions") for part in "kv"]
    duals = [tensors.get(f"{part}_code_duals") for part in "kv"]
    if _fits(directions[0], weights.w_k_GKD) and weights.norm_k is None:
        weights = replace(
            weights,
            w_q_HKD=_mixed(weights.w_q_HKD, directions[0]),
            b_q_HK=_mixed_bias(weights.b_q_HK, directions[0]),
            w_k_GKD=_mixed(weights.w_k_GKD, duals[0]),
            b_k_GK=_mixed_bias(weights.b_k_GK, duals[0]),
        )
    if _fits(directions[1], weights.w_v_GVD):
        weights = replace(
            weights,
            w_v_GVD=_mixed(weights.w_v_GVD, duals[1]),
            b_v_GV=_mixed_bias(weights.b_v_GV, duals[1]),
            w_o_HVD=_mixed(weights.w_o_HVD, directions[1]),
        )
    return weights


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
