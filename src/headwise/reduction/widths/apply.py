"""Attention weights cut to a planned shape, along directions that were measured or by the weights alone.

Which RoPE pairs stay is decided before (`reduction.widths.settle`). Value and output, and query and key where no rotary
position or norm stands between them, are cut jointly, all query heads of a key/value head at once: along the
directions of a profile, or, the papers' way and the baseline to beat, by truncated SVD of their products. Rotary
coordinates keep whole pairs. Biases ride along as one more input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.weights import AttentionWeights
from headwise.files.errors import InputError
from headwise.linalg.joint import joint_truncate
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.directions import Kept, kept_directions
from headwise.reduction.widths.token_weighted import token_directions


def apply(
    weights: AttentionWeights, change: Widths, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights:
    """The weights that stay of a layer, along directions that ``statistics`` name; without any by the weights alone."""
    if statistics is None or not change.narrower(layer):
        return cut_attention(weights, change, layer)
    if statistics.method == "token-weighted":
        return cut_attention(weights, change, layer, token_directions(weights, change, layer, statistics))
    return cut_attention(weights, change, layer, kept_directions(change, layer, statistics))


def cut_attention(
    weights: AttentionWeights, change: Widths, layer: LayerShape, kept: Kept | None = None
) -> AttentionWeights:
    """The weights a layer keeps under ``change``, along ``kept`` directions or by SVD; keeping all changes nothing."""
    weights = keep_heads(weights, change, layer)
    if change.v_dim < layer.v_dim:
        weights = _cut_values(weights, change.v_dim) if kept is None else _project_values(weights, kept)
    if change.qk_dim < layer.qk_dim:
        weights = _cut_queries(weights, change, layer, kept)
    return weights


def _merge_groups(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """Neighbouring key/value heads replaced by their mean, as when multi-head models are turned into grouped ones."""
    if weights.rope_pairs_GP is not None:
        raise InputError("Key/value heads that keep RoPE pairs of their own cannot be merged.")

    def mean(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (kv_heads, -1)).mean(dim=1)

    return replace(
        weights,
        w_k_GKD=mean(weights.w_k_GKD),
        w_v_GVD=mean(weights.w_v_GVD),
        b_k_GK=_maybe(mean, weights.b_k_GK),
        b_v_GV=_maybe(mean, weights.b_v_GV),
    )


def keep_heads(weights: AttentionWeights, change: Widths, layer: LayerShape) -> AttentionWeights:
    """The heads a layer keeps under ``change``, at their full widths."""
    if change.kept_heads is None and change.merges(layer):
        return _merge_groups(weights, change.kv_heads)
    if change.kept_heads is None and (change.heads, change.kv_heads) == (layer.heads, layer.kv_heads):
        return weights
    groups = torch.tensor(change.kept_groups(layer), device=weights.w_q_HKD.device)
    heads = kept_heads(change, layer).to(groups.device)

    def pick(tensor: Tensor, index: Tensor) -> Tensor:
        return tensor if tensor.ndim == 1 else tensor[index]  # one norm serves all heads

    return replace(
        weights,
        w_q_HKD=pick(weights.w_q_HKD, heads),
        w_k_GKD=pick(weights.w_k_GKD, groups),
        w_v_GVD=pick(weights.w_v_GVD, groups),
        w_o_HVD=pick(weights.w_o_HVD, heads),
        b_q_HK=_maybe(pick, weights.b_q_HK, heads),
        b_k_GK=_maybe(pick, weights.b_k_GK, groups),
        b_v_GV=_maybe(pick, weights.b_v_GV, groups),
        norm_q=_maybe(pick, weights.norm_q, heads),
        norm_k=_maybe(pick, weights.norm_k, groups),
        rope_pairs_GP=_maybe(pick, weights.rope_pairs_GP, groups),
    )


def kept_heads(change: Widths, layer: LayerShape) -> Tensor:
    """Original query heads a layer keeps under ``change``, in their new order."""
    if change.kept_heads is not None:
        return torch.tensor(change.kept_heads)
    if change.merges(layer):
        return torch.arange(layer.heads)
    per_old, per_new = layer.heads // layer.kv_heads, change.heads // change.kv_heads
    return (torch.tensor(change.kept_groups(layer))[:, None] * per_old + torch.arange(per_new)).flatten()


def _maybe(function: Callable[..., Tensor], tensor: Tensor | None, *rest: Tensor) -> Tensor | None:
    """``function`` of a tensor that may not be there."""
    return None if tensor is None else function(tensor, *rest)


def _with_bias(w_NRD: Tensor, b_NR: Tensor | None) -> Tensor:
    """(N, R, D), or (N, R, D + 1) with the bias as the column that a constant input would multiply."""
    return w_NRD if b_NR is None else torch.cat((w_NRD, b_NR[..., None]), dim=-1)


def _without_bias(w_NRD: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    return (w_NRD[..., :-1], w_NRD[..., -1]) if biased else (w_NRD, None)


def by_group(x_HRD: Tensor, groups: int) -> Tensor:
    """Rows of all query heads of a group stacked: (H, R, D) as (G, H/G * D, R)."""
    return x_HRD.mT.unflatten(0, (groups, -1)).flatten(1, 2)


def _by_head(rows_GNR: Tensor, heads: int) -> Tensor:
    """The way back: (G, H/G * D, R) as (H, R, D)."""
    return rows_GNR.unflatten(1, (heads // rows_GNR.shape[0], -1)).flatten(0, 1).mT


def _cut_values(weights: AttentionWeights, v_dim: int) -> AttentionWeights:
    H, G = weights.w_o_HVD.shape[0], weights.w_v_GVD.shape[0]
    out, values = joint_truncate(by_group(weights.w_o_HVD, G), _with_bias(weights.w_v_GVD, weights.b_v_GV).mT, v_dim)
    w_v, b_v = _without_bias(values.mT, weights.b_v_GV is not None)
    return replace(weights, w_v_GVD=w_v, b_v_GV=b_v, w_o_HVD=_by_head(out, H))


def _project_values(weights: AttentionWeights, kept: Kept) -> AttentionWeights:
    directions, duals = (_like(t, weights.w_v_GVD) for t in (kept.v_directions_GVR, kept.v_duals_GVR))
    w_v, b_v = _without_bias(duals.mT @ _with_bias(weights.w_v_GVD, weights.b_v_GV), weights.b_v_GV is not None)
    per_head = directions.repeat_interleave(weights.w_o_HVD.shape[0] // directions.shape[0], dim=0)
    return replace(weights, w_v_GVD=w_v, b_v_GV=b_v, w_o_HVD=per_head.mT @ weights.w_o_HVD)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.to(device=other.device, dtype=other.dtype)


def _cut_queries(weights: AttentionWeights, change: Widths, layer: LayerShape, kept: Kept | None) -> AttentionWeights:
    H, G = weights.w_q_HKD.shape[0], weights.w_k_GKD.shape[0]
    pairs = change.pairs(layer)
    turned = _kept_coordinates(change, layer, weights.w_k_GKD.device)
    free, free_before = change.qk_dim - 2 * pairs, layer.qk_dim - layer.rotary
    rest = torch.arange(layer.rotary, layer.qk_dim, device=turned.device).expand(G, -1)
    if weights.norm_q is not None:
        # Norms divide by all coordinates and weigh each: coordinates can be picked, not mixed.
        return _pick_coordinates(weights, torch.cat((turned, rest[:, :free]), dim=1), pairs, layer)
    picked = _pick_coordinates(weights, torch.cat((turned, rest), dim=1), pairs, layer)
    if free == free_before:
        return picked
    biased_q, biased_k = picked.b_q_HK is not None, picked.b_k_GK is not None
    q_turned, q_free = _with_bias(picked.w_q_HKD, picked.b_q_HK).split([2 * pairs, free_before], dim=1)
    k_turned, k_free = _with_bias(picked.w_k_GKD, picked.b_k_GK).split([2 * pairs, free_before], dim=1)
    if kept is None:
        rows, columns = joint_truncate(by_group(q_free, G), k_free.mT, free)
        queries, keys = _by_head(rows, H), columns.mT
    else:
        directions, duals = (_like(t, k_free) for t in (kept.qk_directions_GFR, kept.qk_duals_GFR))
        queries, keys = directions.repeat_interleave(H // G, dim=0).mT @ q_free, duals.mT @ k_free
    w_q, b_q = _without_bias(torch.cat((q_turned, queries), dim=1), biased_q)
    w_k, b_k = _without_bias(torch.cat((k_turned, keys), dim=1), biased_k)
    return replace(picked, w_q_HKD=w_q, w_k_GKD=w_k, b_q_HK=b_q, b_k_GK=b_k)


def _kept_coordinates(change: Widths, layer: LayerShape, device: torch.device) -> Tensor:
    """Rotary coordinates each key/value head keeps, (G, 2 * pairs)."""
    half = layer.rotary // 2
    named = change.rope_pairs or (tuple(range(half)),) * change.kv_heads
    kept_GP = torch.tensor(named, dtype=torch.long, device=device).sort(dim=-1).values
    return torch.cat((kept_GP, kept_GP + half), dim=1)


def _pick_coordinates(
    weights: AttentionWeights, coordinates_GK: Tensor, pairs: int, layer: LayerShape
) -> AttentionWeights:
    H, G = weights.w_q_HKD.shape[0], weights.w_k_GKD.shape[0]
    per_head = coordinates_GK.repeat_interleave(H // G, dim=0)

    def pick(tensor: Tensor, index: Tensor) -> Tensor:
        shape = (*index.shape, *tensor.shape[2:])
        return tensor.gather(1, index.view(*index.shape, *[1] * (tensor.ndim - 2)).expand(shape))

    def pick_norm(norm: Tensor, index: Tensor) -> Tensor:
        if norm.ndim == 1 and (index == index[:1]).all():
            return norm[index[0]]
        return norm.expand(index.shape[0], 1, norm.shape[-1])[:, 0].gather(1, index)[:, None]

    rope = weights.rope_pairs_GP
    if 2 * pairs < layer.rotary:
        rope = coordinates_GK[:, :pairs] if rope is None else rope.gather(1, coordinates_GK[:, :pairs])
    return replace(
        weights,
        w_q_HKD=pick(weights.w_q_HKD, per_head),
        w_k_GKD=pick(weights.w_k_GKD, coordinates_GK),
        b_q_HK=_maybe(pick, weights.b_q_HK, per_head),
        b_k_GK=_maybe(pick, weights.b_k_GK, coordinates_GK),
        norm_q=_maybe(pick_norm, weights.norm_q, per_head),
        norm_k=_maybe(pick_norm, weights.norm_k, coordinates_GK),
        rotary=2 * pairs,
        rope_pairs_GP=rope,
    )
