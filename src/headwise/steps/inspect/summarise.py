"""From running sums to a profile: spectra, ranks, exponents, predicted loss increases, and tensors for planning."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.families.sites import Site
from headwise.families.weights import blocks_of, read_attention
from headwise.linalg.coordinates import Units
from headwise.linalg.maps import at
from headwise.linalg.masks import coherence
from headwise.linalg.spectra import Basis, dims_holding, product_spectrum, weighted_spectrum
from headwise.linalg.sums import Sums
from headwise.planning.sensitivity import best_split, cut_curve
from headwise.records.profile import MLP_PARTS, PARTS, SHARES, LayerProfile, rounded
from headwise.records.shape import LayerShape
from headwise.theory.conditioning import gaussian_condition
from headwise.tracing.absorbed import block_moments, importances
from headwise.tracing.channels import channel_losses
from headwise.tracing.coded import importances as code_importances
from headwise.tracing.collect import MASKS, Collector, by_group, centred_keys, cut_widths
from headwise.tracing.shared import between_heads, unit_damage

BY_LENGTH = (
    "hard_rank",
    "numerical_rank",
    "effective_rank",
    "stable_rank",
    "jacobian_mean",
    "jacobian_p95",
    "jacobian_bound",
    "logit_spread",
    "entropy",
    "first_token",
)
FEWEST_POINTS = 2


def layer_profile(collector: Collector, i: int) -> LayerProfile:
    """Everything known of layer ``i``, as nested lists of plain numbers."""
    site, layer, sums = collector.sites[i], collector.layers[i], collector.sums[i]
    if not layer.heads:
        return LayerProfile(site.path, False, (), (), (), {})
    units, basis, gram = collector.units[i], collector.bases[i], collector.grams[i]
    lengths = _lengths(sums)
    quantities: dict[str, Any] = {**_pairs(layer, sums, units), **_damage(sums, layer, units)}
    if i in collector.coded:
        quantities |= {f"{name}_bit_damage": loss for name, loss in code_importances(collector.coded[i], sums).items()}
    if i in collector.positions:
        quantities |= _absorbed(site, layer, sums, collector.positions[i])
    if i in collector.shared:
        quantities |= {f"shared_{kind}_damage": loss for kind, loss in unit_damage(layer, sums).items()}
    if sums.has("mlp_fisher"):
        quantities["mlp_damage"] = _channel_damage(sums)
    if collector.substituted:
        losses = collector.substituted[i]
        quantities["left_out"] = [losses[part] for part in PARTS]
        if "flattened" in losses:
            quantities["flattened"] = losses["flattened"]
    if collector.maps:
        quantities |= {
            **_spectra(site, layer, sums, gram),
            **_by_length(sums, lengths),
            **_twins(sums),
            **_cuts(sums, layer),
            **_value_cuts(layer, sums, basis, gram),
            **_conditioning(sums, layer, lengths),
        }
    values = {
        name: rounded(value.tolist() if isinstance(value, Tensor) else value) for name, value in quantities.items()
    }
    causal = bool(sums.mean("causal"))
    samples = int(sums.count("q_moment"))
    return LayerProfile(site.path, causal, lengths, cut_widths(layer.qk_dim), cut_widths(layer.v_dim), values, samples)


def layer_tensors(collector: Collector, i: int) -> dict[str, Tensor]:
    """What planning and compression take up again: moments, bases and the Fisher information of all masks."""
    if not collector.layers[i].heads:
        return {}
    sums, free, basis = collector.sums[i], collector.units[i].free, collector.bases[i]
    tensors = {
        "q_moment": sums.mean("q_moment"),
        "k_moment": sums.mean("k_moment"),
        "k_mean": sums.mean("k_mean"),
        "v_moment": sums.mean("v_moment"),
        "out_moment": sums.mean("out_moment"),
        "qk_fisher": sums.mean("qk_fisher"),
        "v_fisher": sums.mean("v_fisher"),
        "qk_directions": free.directions_NRR,
        "qk_duals": free.duals_NRR,
        "v_directions": basis.directions_NRR,
        "v_duals": basis.duals_NRR,
    }
    if i in collector.coded:
        bases = dict(collector.coded[i])
        keys = bases.pop("k")
        tensors |= {"k_code_directions": keys.directions_NRR, "k_code_duals": keys.duals_NRR}
        tensors |= {f"{name}_code_map": basis.directions_NRR for name, basis in bases.items()}
    if i in collector.positions:
        moments = block_moments(sums)._asdict()
        tensors |= {f"absorbed_{name.rpartition('_')[0]}": tensor for name, tensor in moments.items()}
    if i in collector.shared:
        tensors |= between_heads(collector.layers[i], sums)
        tensors |= {f"shared_{kind}_damage": loss for kind, loss in unit_damage(collector.layers[i], sums).items()}
    if sums.has("mlp_fisher"):
        order = channel_losses(sums).argsort(descending=True, stable=True)
        tensors["mlp_order"] = order.to(torch.int32)
    return {
        f"{i}.{name}": (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _lengths(sums: Sums) -> tuple[int, ...]:
    start = at("jacobian_mean", 0)[:-1]
    return tuple(sorted(int(name[len(start) :]) for name in sums.totals if name.startswith(start) and name[-1] != "#"))


def _pairs(layer: LayerShape, sums: Sums, units: Units) -> dict[str, Tensor]:
    per_head = sums.mean("scale") * (layer.kv_heads / layer.heads) ** 0.5
    energy_GP = units.energy_GU[:, : len(units.layout.pairs_P2)] * per_head
    if not energy_GP.shape[1]:
        return {}
    ordered = energy_GP.sort(dim=-1, descending=True).values
    dims = torch.stack([2 * dims_holding(ordered, share) for share in SHARES], dim=-1)
    return {"rope_pair_energy": energy_GP, "rope_pair_dims": dims}


def _spectra(site: Site, layer: LayerShape, sums: Sums, gram_HVV: Tensor) -> dict[str, Tensor]:
    weights = read_attention(site, layer.rotary)
    G, per_group = layer.kv_heads, layer.heads // layer.kv_heads
    w_k, w_v = (w.detach().repeat_interleave(per_group, dim=0) for w in (weights.w_k_GKD, weights.w_v_GVD))
    q_HKK, k_GKK = sums.mean("q_moment"), centred_keys(sums)
    out_HVV, scale = sums.mean("out_moment"), sums.mean("scale")
    spectra = {
        "qk_weight": product_spectrum(weights.w_q_HKD.detach().mT, w_k.mT),
        "qk_data": weighted_spectrum(q_HKK, k_GKK.repeat_interleave(per_group, dim=0)) * scale,
        "vo_weight": product_spectrum(weights.w_o_HVD.detach().mT, w_v.mT),
        "vo_data": weighted_spectrum(gram_HVV, out_HVV),
    }
    spectra["qk_group"] = weighted_spectrum(by_group(q_HKK, G), k_GKK) * scale
    spectra["vo_group"] = weighted_spectrum(by_group(gram_HVV, G), by_group(out_HVV, G))
    dims = {
        f"{name}_dims": torch.stack([dims_holding(s, share) for share in SHARES], dim=-1) for name, s in spectra.items()
    }
    return {**{f"{name}_spectrum": s for name, s in spectra.items()}, **dims}


def _by_length(sums: Sums, lengths: tuple[int, ...]) -> dict[str, Any]:
    quantities: dict[str, Any] = {}
    for name in BY_LENGTH:
        measured = [sums.mean(at(name, L)) if sums.has(at(name, L)) else None for L in lengths]
        if any(value is not None for value in measured):
            heads = range(len(next(value for value in measured if value is not None)))
            quantities[name] = [[None if value is None else value[h].tolist() for value in measured] for h in heads]
    norms = torch.stack([sums.mean(at("jacobian_mean", L)) for L in lengths], dim=-1).clamp(min=1e-30).log()
    if len(lengths) >= FEWEST_POINTS:
        x = torch.tensor(lengths, dtype=torch.float64).log()
        x = x - x.mean()
        quantities["jacobian_exponent"] = (norms * x).sum(-1) / x.square().sum()
    return quantities


def _twins(sums: Sums) -> dict[str, Tensor]:
    overlap = sums.mean("overlap")
    if len(overlap) == 1:
        return {"twin": torch.zeros(1, dtype=torch.long), "twin_overlap": torch.zeros(1)}
    best = (overlap - 2 * torch.eye(len(overlap), dtype=overlap.dtype)).max(dim=-1)
    return {"twin": best.indices, "twin_overlap": best.values}


def _cuts(sums: Sums, layer: LayerShape) -> dict[str, Any]:
    widths = cut_widths(layer.qk_dim)
    if not widths:
        return {}
    rows = torch.stack([sums.mean(f"cut_rows@{w}") for w in widths], dim=-1)
    errors = torch.stack([sums.mean(f"cut_output@{w}") for w in widths], dim=-1)
    return {"cut_rows": rows, "cut_output": _relative(errors, sums.mean("cut_energy")[:, None])}


def _value_cuts(layer: LayerShape, sums: Sums, basis: Basis, gram: Tensor) -> dict[str, Tensor]:
    """Closed form: what the directions beyond a width hold of each head's output, and of its products with the rest."""
    widths, per_group = cut_widths(layer.v_dim), layer.heads // layer.kv_heads
    if not widths:
        return {}
    moment = sums.mean("out_moment")
    directions, duals = (t.repeat_interleave(per_group, dim=0) for t in (basis.directions_NRR, basis.duals_NRR))
    errors = []
    for width in widths:
        lost = directions[..., width:] @ duals[..., width:].mT
        errors.append((gram @ lost @ moment * lost).sum((-1, -2)))
    return {"vo_cut_output": _relative(torch.stack(errors, dim=-1), (gram * moment).sum((-1, -2))[:, None])}


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return (error / energy.clamp(min=1e-30)).clamp(min=0).sqrt()


def _conditioning(sums: Sums, layer: LayerShape, lengths: tuple[int, ...]) -> dict[str, list[float | None]]:
    known = {L: math.exp(sums.mean(at("conditioning", L)).item()) for L in lengths if sums.has(at("conditioning", L))}
    return {
        "conditioning": [known.get(L) for L in lengths],
        "conditioning_gaussian": [gaussian_condition(L, layer.heads * layer.v_dim) for L in lengths],
    }


def _damage(sums: Sums, layer: LayerShape, units: Units) -> dict[str, Any]:
    """Half the Fisher information of every mask, and curves of the predicted loss increase against width."""
    together = {kind: coherence(sums, kind) for kind in MASKS}
    qk_GU, v_GV, heads_H1 = (
        sums.mean(f"{kind}_fisher").diagonal(dim1=-2, dim2=-1) / 2 * together[kind] for kind in MASKS
    )
    P = len(units.layout.pairs_P2)
    pairs, free, values = (cut_curve(part.tolist()) for part in (qk_GU[:, :P], qk_GU[:, P:], v_GV))
    splits = [best_split(pairs, free, width) for width in range(layer.qk_dim + 1)]
    return {
        "coherence": [factor.item() for factor in together.values()],
        "head_damage": heads_H1[:, 0],
        "qk_unit_damage": qk_GU,
        "v_unit_damage": v_GV,
        "qk_damage": [None if split is None else split[0] for split in splits],
        "qk_pairs": [0 if split is None else split[1] for split in splits],
        "v_damage": values,
    }


def _absorbed(site: Site, layer: LayerShape, sums: Sums, lost: dict[int, float]) -> dict[str, Any]:
    """What letting go of positions cost, and what losing each coordinate of the caches behind it would."""
    weights = blocks_of(read_attention(site, layer.rotary), layer.kv_heads // layer.value_groups)
    pairs, latents = importances(layer, block_moments(sums), weights, list(lost))
    return {
        "positions_free": list(lost),
        "positions_lost": list(lost.values()),
        "absorbed_pair_damage": pairs,
        "absorbed_latent_damage": torch.stack(latents),
    }


def _channel_damage(sums: Sums) -> list[float]:
    """Predicted loss increase of keeping each sixty-fourth of the MLP's channels."""
    curve = cut_curve([channel_losses(sums).tolist()])
    return [curve[round(part * (len(curve) - 1) / MLP_PARTS)] for part in range(MLP_PARTS + 1)]
