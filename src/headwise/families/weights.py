"""Attention weights of any family in one neutral view, and back.

Shape letters as in `headwise.linalg`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise.families.absorbed import AbsorbedWeights, is_absorbed, read_absorbed
from headwise.families.latent import LatentWeights, last_queries, read_latent
from headwise.families.sites import Site, is_transposed, matrix
from headwise.files.errors import InputError


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One attention layer. A head's logits are ``(w_q x + b_q) . (w_k y + b_k) * scale``, after norms and RoPE.

    Rotary coordinates stand first in a head, pair ``p`` in coordinates ``p`` and ``p + P``; ``rope_pairs_GP`` names
    the frequency of each pair (None: all, in order). Under latent attention (MLA) the matrices are the products
    through the latents, up to the scalar by which the latents' RMS norms divide each token. Where ``absorbed`` says
    what is cached, keys and values are those that it stands for: they follow from it. ``latent`` holds what of latent
    attention can be changed: only that is written.
    """

    w_q_HKD: Tensor
    w_k_GKD: Tensor
    w_v_GVD: Tensor
    w_o_HVD: Tensor
    scale: float
    b_q_HK: Tensor | None = None
    b_k_GK: Tensor | None = None
    b_v_GV: Tensor | None = None
    b_o_D: Tensor | None = None
    norm_q: Tensor | None = None
    norm_k: Tensor | None = None
    rotary: int = 0
    rope_pairs_GP: Tensor | None = None
    absorbed: AbsorbedWeights | None = None
    latent: LatentWeights | None = None


def read_attention(site: Site, rotary: int) -> AttentionWeights:
    """The weights of ``site`` as views where the layout allows it; RoPE turns ``rotary`` coordinates of a head.

    >>> site, layer = hw.sites_of(model)[0], hw.shape_of(model).layers[0]
    >>> tuple(hw.read_attention(site, layer.rotary).w_q_HKD.shape)
    (4, 8, 32)
    """
    if site.removed:
        raise InputError(f"{site.path} has no attention to read.")
    if site.family.latent:
        return _read_through_latent(site, rotary)
    if is_absorbed(site.module):
        return _read_absorbed(site, rotary)
    K = site.head_width
    (w_q, w_k, w_v), (b_q, b_k, b_v) = _projections(site, K)
    out = matrix(site.out)
    H, G = w_q.shape[0] // K, w_k.shape[0] // K
    V = out.shape[1] // H
    norms = [getattr(site.module, name, None) for name in site.family.norms] or [None, None]
    return AttentionWeights(
        w_q_HKD=w_q.unflatten(0, (H, K)),
        w_k_GKD=w_k.unflatten(0, (G, K)),
        w_v_GVD=w_v.unflatten(0, (G, V)),
        w_o_HVD=out.T.unflatten(0, (H, V)),
        scale=float(site.module.scaling),
        b_q_HK=None if b_q is None else b_q.unflatten(0, (H, K)),
        b_k_GK=None if b_k is None else b_k.unflatten(0, (G, K)),
        b_v_GV=None if b_v is None else b_v.unflatten(0, (G, V)),
        b_o_D=cast(Tensor | None, site.out.bias),
        norm_q=None if norms[0] is None else norms[0].weight,
        norm_k=None if norms[1] is None else norms[1].weight,
        rotary=rotary,
        rope_pairs_GP=getattr(site.module, "rope_pairs", None),
    )


def write_attention(site: Site, weights: AttentionWeights) -> None:
    """Copy ``weights`` into the projections of ``site``, in its own layout, dtype and device.

    >>> site, layer = hw.sites_of(model)[0], hw.shape_of(model).layers[0]
    >>> hw.write_attention(site, hw.read_attention(site, layer.rotary))  # changes nothing
    """
    family, module = site.family, site.module
    if weights.latent is not None:
        fill(last_queries(module), weights.latent.w_q_HKC.flatten(0, 1), None)
        fill(module.kv_a_proj_with_mqa, weights.latent.w_down_LD, weights.latent.b_down_L)
        return
    parts = [(weights.w_q_HKD, weights.b_q_HK), (weights.w_k_GKD, weights.b_k_GK), (weights.w_v_GVD, weights.b_v_GV)]
    if weights.absorbed is not None:
        parts[1:] = _put_absorbed(module, weights.absorbed, weights.rope_pairs_GP)
    if family.fused and not site.reduced:
        fill(getattr(module, family.fused), *_fuse(parts, family.fused_by))
    else:
        for name, (weight, bias) in zip((family.q, family.k, family.v), parts, strict=True):
            if weight.numel():
                fill(getattr(module, name), weight.flatten(0, 1), None if bias is None else bias.flatten())
    fill(site.out, weights.w_o_HVD.flatten(0, 1).T, weights.b_o_D)
    for name, norm in zip(family.norms, (weights.norm_q, weights.norm_k), strict=False):
        if norm is not None:
            put(getattr(module, name), "weight", norm)
    listed = getattr(module, "rope_pairs", None)
    if weights.rope_pairs_GP is not None:
        module.rope_pairs = weights.rope_pairs_GP.clone()
    elif listed is not None:
        module.rope_pairs = torch.arange(listed.shape[1], device=weights.w_k_GKD.device).expand(listed.shape).clone()


def rescaled(weights: AttentionWeights, scale: float) -> AttentionWeights:
    """The same logits under another ``scale``: the ratio moves into the queries, or into their norm."""
    ratio = weights.scale / scale
    if ratio == 1.0:
        return weights
    if weights.norm_q is not None:
        return replace(weights, norm_q=weights.norm_q * ratio, scale=scale)
    bias = None if weights.b_q_HK is None else weights.b_q_HK * ratio
    return replace(weights, w_q_HKD=weights.w_q_HKD * ratio, b_q_HK=bias, scale=scale)


def balanced(weights: AttentionWeights) -> AttentionWeights:
    """The same attention with equal norms of each value coordinate in the value and the output matrix.

    A reduction leaves the two at any scale; an optimizer that moves every weight by as much would ruin the smaller
    ones first.
    """
    if weights.absorbed is not None:
        return weights
    w_v, w_o = weights.w_v_GVD, weights.w_o_HVD
    out_norm_GV = w_o.unflatten(0, (len(w_v), -1)).square().sum(-1).mean(1).sqrt()
    value_norm_GV = w_v.square().sum(-1).sqrt()
    nonzero = (out_norm_GV > 0) & (value_norm_GV > 0)
    factor_GV = torch.where(nonzero, (out_norm_GV / value_norm_GV.clamp(min=torch.finfo(w_v.dtype).tiny)).sqrt(), 1.0)
    factor_HV = factor_GV.repeat_interleave(len(w_o) // len(w_v), dim=0)
    return replace(
        weights,
        w_v_GVD=w_v * factor_GV[..., None],
        b_v_GV=None if weights.b_v_GV is None else weights.b_v_GV * factor_GV,
        w_o_HVD=w_o / factor_HV[..., None],
    )


def blocks_of(weights: AttentionWeights, joined: int) -> Tensor:
    """What each block would cache, (M, W, D), or (M, W, D + 1) with biases as what a constant input would add."""
    biases = (weights.b_k_GK, weights.b_v_GV)
    parts = []
    for weight, bias in zip((weights.w_k_GKD, weights.w_v_GVD), biases, strict=True):
        rows = weight.detach().double().cpu()
        if any(each is not None for each in biases):
            last = rows.new_zeros(rows.shape[:2]) if bias is None else bias.detach().double().cpu()
            rows = torch.cat((rows, last[..., None]), dim=-1)
        parts.append(rows.unflatten(0, (-1, joined)).flatten(1, 2))
    return torch.cat(parts, dim=1)


def _read_absorbed(site: Site, rotary: int) -> AttentionWeights:
    """Attention that reads latents, with the keys and values that it would read in their stead."""
    module, family = site.module, site.family
    absorbed = read_absorbed(module, getattr(module, family.k), getattr(module, family.v))
    queries, H = getattr(module, family.q), module.heads
    w_k, b_k = absorbed.keys(rotary // 2)
    w_v, b_v = absorbed.values()
    return AttentionWeights(
        w_q_HKD=matrix(queries).unflatten(0, (H, -1)),
        w_k_GKD=w_k,
        w_v_GVD=w_v,
        w_o_HVD=matrix(site.out).T.unflatten(0, (H, -1)),
        scale=float(module.scaling),
        b_q_HK=None if queries.bias is None else queries.bias.unflatten(0, (H, -1)),
        b_k_GK=b_k,
        b_v_GV=b_v,
        b_o_D=cast(Tensor | None, site.out.bias),
        rotary=rotary,
        rope_pairs_GP=module.rope_pairs,
        absorbed=absorbed,
    )


def _put_absorbed(
    module: nn.Module, absorbed: AbsorbedWeights, pairs_GP: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Copy the maps and the list of cached pairs; returns weights and biases of the two projections."""
    for name, value in (
        ("factors", absorbed.factors_2GP),
        ("key_maps", absorbed.key_maps_GFR),
        ("value_maps", absorbed.value_maps_GRV),
        ("value_shift", absorbed.shift_GV),
    ):
        put(module, name, value)
    if pairs_GP is not None:
        module.cached_rope_pairs = pairs_GP[0][absorbed.places_MP]
    return [(absorbed.w_pairs_MCD, absorbed.b_pairs_MC), (absorbed.w_latent_MRD, absorbed.b_latent_MR)]


def attention_projections(site: Site) -> list[Any]:
    """The modules that make queries, keys and values."""
    family, module = site.family, site.module
    if family.latent:
        inner = [] if module.q_lora_rank is None else [module.q_a_proj]
        return [last_queries(module), *inner, module.kv_a_proj_with_mqa, module.kv_b_proj]
    names = [family.fused] if family.fused and not site.reduced else [family.q, family.k, family.v]
    return [getattr(module, name) for name in names]


def _projections(site: Site, K: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights (out, in) and biases of q, k and v, taken out of a fused matrix where there is one."""
    family = site.family
    linears = attention_projections(site)
    if len(linears) > 1:
        return [matrix(linear) for linear in linears], [linear.bias for linear in linears]
    (fused,) = linears
    weight, bias = matrix(fused), cast(Tensor | None, fused.bias)
    H = matrix(site.out).shape[1] // K
    if family.fused_by == "heads":
        split = [part.flatten(0, 1) for part in weight.unflatten(0, (H, 3, K)).unbind(1)]
        biases = [None] * 3 if bias is None else [part.flatten() for part in bias.unflatten(0, (H, 3, K)).unbind(1)]
        return split, cast(list[Tensor | None], biases)
    G = (weight.shape[0] - H * K) // (2 * K)
    sizes = [H * K, G * K, G * K]
    return list(weight.split(sizes)), [None] * 3 if bias is None else list(bias.split(sizes))


def _fuse(parts: list[tuple[Tensor, Tensor | None]], by: str) -> tuple[Tensor, Tensor | None]:
    """q, k and v put back into one matrix and one bias."""
    weights, biases = zip(*parts, strict=True)
    if by == "heads":
        weight = torch.stack(weights, dim=1).flatten(0, 2)
        return weight, None if biases[0] is None else torch.stack(biases, dim=1).flatten()
    weight = torch.cat([part.flatten(0, 1) for part in weights])
    return weight, None if biases[0] is None else torch.cat([part.flatten() for part in biases])


def fill(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Copy an (out, in) matrix and a bias into a projection, whichever way it stores them."""
    put(module, "weight", weight.T if is_transposed(module) else weight)
    if bias is not None:
        put(module, "bias", bias)


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Give ``module`` its own copy of ``value``; works for modules on the meta device as well."""
    old = cast(nn.Parameter, getattr(module, name))
    if old.shape != value.shape:
        raise InputError(f"A weight of shape {tuple(value.shape)} does not fit a place of shape {tuple(old.shape)}.")
    fresh = value.detach().to(dtype=old.dtype, copy=True, memory_format=torch.contiguous_format)
    setattr(module, name, nn.Parameter(fresh, requires_grad=old.requires_grad))


def _read_through_latent(site: Site, rotary: int) -> AttentionWeights:
    """MLA through its latents: keys share one rotary part, everything else comes out of the latent."""
    module = site.module
    H, V, nope = module.num_heads, module.v_head_dim, module.qk_nope_head_dim
    if module.q_lora_rank is None:
        w_q = module.q_proj.weight
    else:
        w_q = module.q_b_proj.weight * module.q_a_layernorm.weight @ module.q_a_proj.weight
    down, shared = module.kv_a_proj_with_mqa.weight.split([module.kv_lora_rank, module.qk_rope_head_dim])
    up = module.kv_b_proj.weight * module.kv_a_layernorm.weight @ down
    w_k_nope, w_v = up.unflatten(0, (H, nope + V)).split([nope, V], dim=1)
    w_q_nope, w_q_rope = w_q.unflatten(0, (H, -1)).split([nope, module.qk_rope_head_dim], dim=1)
    return AttentionWeights(
        w_q_HKD=torch.cat((w_q_rope, w_q_nope), dim=1),
        w_k_GKD=torch.cat((shared.expand(H, -1, -1), w_k_nope), dim=1),
        w_v_GVD=w_v,
        w_o_HVD=matrix(site.out).T.unflatten(0, (H, V)),
        scale=float(module.scaling),
        b_o_D=cast(Tensor | None, site.out.bias),
        rotary=rotary,
        latent=read_latent(site),
    )
