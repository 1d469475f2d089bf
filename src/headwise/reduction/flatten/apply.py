"""The weights of several blocks in, those of the one block that adds up what they would: exact up to rounding.

All read the same residual stream, so each half's own norm moves into the projections behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.mlp import MlpWeights
from headwise.families.norms import NormWeights
from headwise.families.weights import AttentionWeights, rescaled


def join_attention(halves: Sequence[tuple[AttentionWeights, NormWeights]]) -> AttentionWeights | None:
    """One attention with the heads of all ``halves``, behind a norm that only normalises; None where there is none."""
    if not halves:
        return None
    folded = [_behind_unit_norm(weights, norm) for weights, norm in halves]
    parts = [rescaled(weights, folded[0].scale) for weights in folded]
    first = parts[0]
    named = any(part.rope_pairs_GP is not None for part in parts)
    return replace(
        first,
        w_q_HKD=torch.cat([part.w_q_HKD for part in parts]),
        w_k_GKD=torch.cat([part.w_k_GKD for part in parts]),
        w_v_GVD=torch.cat([part.w_v_GVD for part in parts]),
        w_o_HVD=torch.cat([part.w_o_HVD for part in parts]),
        b_q_HK=_joined([part.b_q_HK for part in parts]),
        b_k_GK=_joined([part.b_k_GK for part in parts]),
        b_v_GV=_joined([part.b_v_GV for part in parts]),
        b_o_D=_summed([part.b_o_D for part in parts]),
        norm_q=_joined([_per_head(part.norm_q, len(part.w_q_HKD)) for part in parts]),
        norm_k=_joined([_per_head(part.norm_k, len(part.w_k_GKD)) for part in parts]),
        rope_pairs_GP=_joined([_pairs(part) for part in parts]) if named else None,
    )


def join_mlp(halves: Sequence[tuple[MlpWeights, NormWeights]]) -> MlpWeights | None:
    """One MLP with the channels of all ``halves``, behind a norm that only normalises; None where there is none."""
    if not halves:
        return None
    parts = [
        replace(
            weights,
            w_up_MD=_scaled(weights.w_up_MD, norm),
            b_up_M=_shifted(weights.w_up_MD, weights.b_up_M, norm),
            w_gate_MD=None if weights.w_gate_MD is None else _scaled(weights.w_gate_MD, norm),
            b_gate_M=None if weights.w_gate_MD is None else _shifted(weights.w_gate_MD, weights.b_gate_M, norm),
        )
        for weights, norm in halves
    ]
    return MlpWeights(
        w_up_MD=torch.cat([part.w_up_MD for part in parts]),
        w_down_MD=torch.cat([part.w_down_MD for part in parts]),
        w_gate_MD=_joined([part.w_gate_MD for part in parts]),
        b_up_M=_joined([part.b_up_M for part in parts]),
        b_gate_M=_joined([part.b_gate_M for part in parts]),
        b_down_D=_summed([part.b_down_D for part in parts]),
    )


def _behind_unit_norm(weights: AttentionWeights, norm: NormWeights) -> AttentionWeights:
    return replace(
        weights,
        w_q_HKD=_scaled(weights.w_q_HKD, norm),
        w_k_GKD=_scaled(weights.w_k_GKD, norm),
        w_v_GVD=_scaled(weights.w_v_GVD, norm),
        b_q_HK=_shifted(weights.w_q_HKD, weights.b_q_HK, norm),
        b_k_GK=_shifted(weights.w_k_GKD, weights.b_k_GK, norm),
        b_v_GV=_shifted(weights.w_v_GVD, weights.b_v_GV, norm),
    )


def _scaled(weight: Tensor, norm: NormWeights) -> Tensor:
    """``weight`` of a projection as it must be without the gain of the norm in front of it."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) * norm.gain_D.to(wide)


def _shifted(weight: Tensor, bias: Tensor | None, norm: NormWeights) -> Tensor | None:
    """The bias of a projection as it must be without the bias of the norm in front of it."""
    if norm.bias_D is None or bias is None:  # without one, the norm's is zero
        return bias
    wide = torch.promote_types(weight.dtype, torch.float32)
    return bias.to(wide) + weight.to(wide) @ norm.bias_D.to(wide)


def _per_head(norm: Tensor | None, heads: int) -> Tensor | None:
    return None if norm is None else norm.view(-1, 1, norm.shape[-1]).expand(heads, 1, -1)


def _pairs(weights: AttentionWeights) -> Tensor:
    if weights.rope_pairs_GP is not None:
        return weights.rope_pairs_GP
    every = torch.arange(weights.rotary // 2, device=weights.w_k_GKD.device)
    return every.expand(len(weights.w_k_GKD), -1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _summed(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.stack(tensors).sum(0) if tensors else None
