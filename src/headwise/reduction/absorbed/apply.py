"""Attention weights that read key/value heads from RoPE pairs mixed across them and one latent without positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.families.absorbed import AbsorbedWeights
from headwise.families.weights import AttentionWeights, blocks_of
from headwise.files.errors import InputError
from headwise.linalg.absorbed import BlockLayout, Moments, latent_basis, pair_basis
from headwise.records.shape import LayerShape
from headwise.reduction.absorbed.change import Absorbed
from headwise.reduction.apply import Statistics


def apply(
    weights: AttentionWeights, change: Absorbed, layer: LayerShape, statistics: Statistics | None
) -> AttentionWeights:
    """The absorbed weights, in the coordinates that the loss feels most; without ``statistics`` by weights alone."""
    if weights.rope_pairs_GP is not None and (weights.rope_pairs_GP != weights.rope_pairs_GP[:1]).any():
        raise InputError("Key/value heads that keep different RoPE pairs share no latent.")
    moments = _of_weights(weights, change.joined) if statistics is None else _measured(change, layer, statistics)
    return absorbed(weights, change, layer, moments)


def absorbed(weights: AttentionWeights, change: Absorbed, layer: LayerShape, moments: Moments) -> AttentionWeights:
    """The absorbed weights in the coordinates that ``moments`` call for."""
    layout = BlockLayout(change.joined, layer.qk_dim, layer.v_dim, layer.rotary)
    w_MWD = blocks_of(weights, change.joined)
    directions_MPC, duals_MPC, places_MP = _pairs(change, layout, moments)
    basis = latent_basis(moments, layout, change.free, w_MWD)
    directions_MLR, duals_MLR = (t[..., : change.rank] for t in (basis.directions_NRR, basis.duals_NRR))
    rank = change.rank - duals_MLR.shape[-1]
    if rank > 0:  # more than the weights tell apart: nothing comes there
        directions_MLR, duals_MLR = (torch.nn.functional.pad(t, (0, rank)) for t in (directions_MLR, duals_MLR))
    rows = layout.latent(change.free)
    J, keys = change.joined, layout.keys(()).numel() // change.joined + 2 * len(change.free)
    w_latent = duals_MLR.mT @ w_MWD[:, rows]
    w_pairs = _pair_weights(duals_MPC, _complex_rows(w_MWD, layout)[:, list(change.turned)], places_MP)
    mean = moments.mean_MW.double()[:, rows]
    shift = (mean - (directions_MLR @ (duals_MLR.mT @ mean[..., None]))[..., 0])[:, J * keys :]
    key_maps, value_maps = directions_MLR[:, : J * keys], directions_MLR[:, J * keys :]
    biased = "k" in layer.biases, "v" in layer.biases
    if not biased[1]:  # of the biases of keys something gets into the latent, which values are to be without
        lost = w_latent[..., -1:] if biased[0] else w_latent[..., :0].sum(-1, keepdim=True)
        shift = shift + (value_maps @ lost)[..., 0]
    like = weights.w_q_HKD
    factors = torch.stack((directions_MPC.real, directions_MPC.imag)).permute(0, 1, 3, 2).flatten(1, 2)
    (w_pairs, b_pairs), (w_latent, b_latent) = (
        _unbiased(w, any(biased), own)
        for w, own in ((w_pairs, biased[0] and bool(places_MP.numel())), (w_latent, biased[1]))
    )
    parts = AbsorbedWeights(
        w_pairs.to(like),
        w_latent.to(like),
        factors.to(like),
        key_maps.reshape(layer.kv_heads, keys, change.rank).to(like),
        value_maps.reshape(-1, layer.v_dim, change.rank).mT.to(like),
        shift.reshape(-1, layer.v_dim).to(like),
        places_MP.to(like.device),
        None if b_pairs is None else b_pairs.to(like),
        None if b_latent is None else b_latent.to(like),
    )
    return _with(parts, weights, change, layer)


def _with(parts: AbsorbedWeights, weights: AttentionWeights, change: Absorbed, layer: LayerShape) -> AttentionWeights:
    """``weights`` with queries in the order in which they meet keys, and keys and values those of ``parts``."""
    half = layer.rotary // 2
    turned, free = (torch.tensor(pairs, dtype=torch.long) for pairs in (change.turned, change.free))
    order = torch.cat((turned, turned + half, free, free + half, torch.arange(layer.rotary, layer.qk_dim)))
    order = order.to(weights.w_q_HKD.device)
    before = torch.arange(half, device=order.device)
    if weights.rope_pairs_GP is not None:
        before = weights.rope_pairs_GP[0]
    w_k, b_k = parts.keys(len(turned))
    w_v, b_v = parts.values()
    return replace(
        weights,
        w_q_HKD=weights.w_q_HKD[:, order],
        b_q_HK=None if weights.b_q_HK is None else weights.b_q_HK[:, order],
        w_k_GKD=w_k,
        b_k_GK=b_k,
        w_v_GVD=w_v,
        b_v_GV=b_v,
        rotary=2 * len(turned),
        rope_pairs_GP=before[turned.to(order.device)].expand(len(w_k), -1),
        absorbed=parts,
    )


def _pairs(change: Absorbed, layout: BlockLayout, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Directions and duals of the cached pairs, (M, P, J), and the place of each among those of a query, (M, P)."""
    named = torch.tensor(change.rope_pairs, dtype=torch.long).view(len(change.rope_pairs), -1)
    basis = pair_basis(moments, layout)
    turned = torch.tensor(change.turned, dtype=torch.long)
    part = torch.tensor(
        [[row[:place].count(pair) for place, pair in enumerate(row)] for row in change.rope_pairs], dtype=torch.long
    ).view_as(named)
    block = torch.arange(len(named))[:, None]
    directions, duals = (t[block, named, :, part] for t in (basis.directions_MPJJ, basis.duals_MPJJ))
    return directions, duals, torch.searchsorted(turned, named)


def _complex_rows(w_MWD: Tensor, layout: BlockLayout) -> Tensor:
    """The keys of each pair in every head as complex numbers, (M, P, J, D)."""
    rows = w_MWD[:, layout.pairs()]
    return torch.complex(*rows.chunk(2, dim=2))


def _pair_weights(duals_MPJ: Tensor, keys_MNJD: Tensor, places_MP: Tensor) -> Tensor:
    """Real parts of the cached pairs, then the imaginary ones, (M, 2P, D)."""
    met = keys_MNJD[torch.arange(len(places_MP))[:, None], places_MP]
    pairs = torch.einsum("mpj,mpjd->mpd", duals_MPJ.conj(), met)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def _unbiased(w_MCD: Tensor, with_biases: bool, own: bool) -> tuple[Tensor, Tensor | None]:
    if not with_biases:
        return w_MCD, None
    return w_MCD[..., :-1], w_MCD[..., -1] if own else None


def _of_weights(weights: AttentionWeights, joined: int) -> Moments:
    """Moments as if all inputs were alike, and the loss felt what queries ask of keys and outputs of values."""
    w_MWD, G = blocks_of(weights, joined), len(weights.w_k_GKD)
    gram = [
        torch.stack(
            [torch.block_diag(*block) for block in (x @ x.mT).unflatten(0, (G, -1)).sum(1).unflatten(0, (-1, joined))]
        )
        for x in (weights.w_q_HKD.detach().double().cpu(), weights.w_o_HVD.detach().double().cpu())
    ]
    felt = torch.stack([torch.block_diag(*each) for each in zip(*gram, strict=True)])
    none = w_MWD.new_zeros(w_MWD.shape[:2])
    return Moments(none, w_MWD @ w_MWD.mT, felt)


def _measured(change: Absorbed, layer: LayerShape, statistics: Statistics) -> Moments:
    """What a profile holds on the layer."""
    measured = statistics.require()
    if "absorbed_second" not in measured or layer.kv_heads // change.joined != layer.value_groups:
        raise InputError(
            f"The profile does not know what blocks of {change.joined} key/value heads of layer {statistics.index} "
            "would cost: inspect the model with `positions`, or use the `method` svd."
        )
    return Moments(*(measured[f"absorbed_{name}"].double() for name in ("mean", "second", "clipped")))
