"""Attention weights whose neighbouring key/value heads are merged into one, its coordinates chosen by importance.

Keys and values of a merged head are maps of those of its heads; each query head reads its own head back out of them,
by maps folded into the query and output projections. Nothing is made anew at decode time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.weights import AttentionWeights
from headwise.files.errors import InputError
from headwise.linalg.sharing import SharedBasis, as_complex, as_real, shared_basis, shared_moments, together
from headwise.records.shape import LayerShape
from headwise.reduction.apply import Statistics
from headwise.reduction.sharing.change import Sharing
from headwise.tracing.shared import measured_basis


def apply(
    weights: AttentionWeights, change: Sharing, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights:
    """The merged weights, by what ``statistics`` say the loss feels; without any by the weights alone."""
    pairs_GP = weights.rope_pairs_GP
    if pairs_GP is not None and (pairs_GP != pairs_GP[:1]).any():
        raise InputError("Key/value heads that keep different RoPE pairs cannot be merged.")
    if statistics is None:
        basis, keys, values = _by_weights(weights, change.joined)
    else:
        basis, keys, values = _by_statistics(weights, change, layer, statistics)
    return _merged(weights, change, layer, basis, keys, values)


def _by_weights(weights: AttentionWeights, joined: int) -> tuple[SharedBasis, Tensor, Tensor]:
    """Basis and importance of its units as if all inputs were alike."""
    q, k, v = _projections(weights)
    k_MJDK, v_MJDV = (x.unflatten(0, (-1, joined)) for x in (k, v))
    moments = shared_moments(k_MJDK, v_MJDV, weights.rotary)
    basis = shared_basis(moments, by_group(q.mT @ q, len(k)), output_gram(weights))
    keys = torch.cat((basis.pair_energy_MPJ.flatten(1), basis.free.values_NR.square()), dim=-1)
    return basis, keys, basis.values.values_NR


def _by_statistics(
    weights: AttentionWeights, change: Sharing, layer: LayerShape, statistics: Statistics
) -> tuple[SharedBasis, Tensor, Tensor]:
    """The basis a profile was measured in, and what losing its units costs."""
    measured = statistics.require()
    if change.joined not in layer.joinable or "shared_k_damage" not in measured:
        raise InputError(
            f"The profile does not know what merging {change.joined} key/value heads of layer {statistics.index} would "
            "cost: use the `method` svd."
        )
    basis = measured_basis(measured, change.joined, output_gram(weights))
    size, merged = layer.joinable.index(change.joined), layer.kv_heads // change.joined
    keys, values = (measured[name][size].unflatten(0, (merged, -1)) for name in ("shared_k_damage", "shared_v_damage"))
    return basis, keys, values


def output_gram(weights: AttentionWeights) -> Tensor:
    """``W_o W_o^T`` of all query heads of each key/value head added up, (G, V, V)."""
    w_o = weights.w_o_HVD.detach().double().cpu()
    return by_group(w_o @ w_o.mT, len(weights.w_v_GVD))


def by_group(x_HCC: Tensor, groups: int) -> Tensor:
    """The matrices of all query heads of a group added up."""
    return x_HCC.unflatten(0, (groups, -1)).sum(1)


def _merged(
    weights: AttentionWeights,
    change: Sharing,
    layer: LayerShape,
    basis: SharedBasis,
    keys_MU: Tensor,
    values_MU: Tensor,
) -> AttentionWeights:
    q_HDK, k_GDK, v_GDV = _projections(weights)
    J, R, half = change.joined, layer.rotary, layer.rotary // 2
    pairs, free = change.pairs(layer), change.qk_dim - 2 * len(change.pairs(layer)[0])
    merged: dict[str, list[Tensor]] = {"q": [], "k": [], "v": [], "o": []}
    each = len(q_HDK) // len(k_GDK)
    w_o_HDV = weights.w_o_HVD.detach().double().cpu().mT
    for m, named in enumerate(pairs):
        k_JDK, v_JDV = (x[m * J : (m + 1) * J] for x in (k_GDK, v_GDV))
        q_JhDK, o_JhDV = (x[m * J * each : (m + 1) * J * each].unflatten(0, (J, each)) for x in (q_HDK, w_o_HDV))
        place_P, part_P = _kept_pairs(keys_MU[m, : half * J].view(half, J), named)
        duals_PJ = basis.pair_duals_MPJJ[m, place_P, :, part_P]
        directions_PJ = basis.pair_directions_MPJJ[m, place_P, :, part_P]
        key = torch.einsum("pj,jdp->dp", duals_PJ.conj(), as_complex(k_JDK[..., :R])[..., place_P])
        query = torch.einsum("pj,jhdp->jhdp", directions_PJ.conj(), as_complex(q_JhDK[..., :R])[..., place_P])
        kept = _strongest(keys_MU[m, half * J :], free)
        free_key = together(k_JDK[None, ..., R:])[0] @ basis.free.duals_NRR[m][:, kept]
        back_JFR = basis.free.directions_NRR[m][:, kept].unflatten(0, (J, -1)) if free else None
        free_query = q_JhDK[..., R:] @ back_JFR[:, None] if back_JFR is not None else q_JhDK[..., :0]
        kept = _strongest(values_MU[m], change.v_dim)
        merged["k"].append(torch.cat((as_real(key), free_key), dim=-1))
        merged["q"].append(torch.cat((as_real(query), free_query), dim=-1).flatten(0, 1))
        merged["v"].append(together(v_JDV[None])[0] @ basis.values.duals_NRR[m][:, kept])
        back_JVR = basis.values.directions_NRR[m][:, kept].unflatten(0, (J, -1))
        merged["o"].append((o_JhDV @ back_JVR[:, None]).flatten(0, 1))
    like = weights.w_q_HKD
    w_q, b_q = _unrolled(torch.cat(merged["q"]), weights.b_q_HK, like)
    w_k, b_k = _unrolled(torch.stack(merged["k"]), weights.b_k_GK, like)
    w_v, b_v = _unrolled(torch.stack(merged["v"]), weights.b_v_GV, like)
    rope_pairs = None
    if R:
        rope_pairs = torch.tensor(pairs, dtype=torch.long, device=like.device)
        if weights.rope_pairs_GP is not None:
            rope_pairs = weights.rope_pairs_GP[0][rope_pairs]
    return replace(
        weights,
        w_q_HKD=w_q,
        w_k_GKD=w_k,
        w_v_GVD=w_v,
        w_o_HVD=torch.cat(merged["o"]).mT.to(like),
        b_q_HK=b_q,
        b_k_GK=b_k,
        b_v_GV=b_v,
        rotary=2 * len(pairs[0]),
        rope_pairs_GP=rope_pairs,
    )


def _kept_pairs(damage_PJ: Tensor, named: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For each named pair its frequency, and which of the coordinates of that frequency it is."""
    parts = [part for pair in sorted(set(named)) for part in _strongest(damage_PJ[pair], named.count(pair)).tolist()]
    return torch.tensor(named, dtype=torch.long), torch.tensor(parts, dtype=torch.long)


def _strongest(importance_U: Tensor, count: int) -> Tensor:
    return importance_U.topk(count).indices.sort().values


def _projections(weights: AttentionWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as `_rows`, in double precision."""
    q, k, v = (
        _rows(weight, bias).detach().double().cpu()
        for weight, bias in (
            (weights.w_q_HKD, weights.b_q_HK),
            (weights.w_k_GKD, weights.b_k_GK),
            (weights.w_v_GVD, weights.b_v_GV),
        )
    )
    return q, k, v


def _rows(weight_NCD: Tensor, bias_NC: Tensor | None) -> Tensor:
    """(N, D, C), or (N, D + 1, C) with the bias as what a constant input would add."""
    rows = weight_NCD.mT
    return rows if bias_NC is None else torch.cat((rows, bias_NC[:, None]), dim=1)


def _unrolled(rows_NDC: Tensor, bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    rows = rows_NDC.to(like)
    return (rows.mT, None) if bias is None else (rows[:, :-1].mT, rows[:, -1])
