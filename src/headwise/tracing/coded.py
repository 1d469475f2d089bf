"""Second moments of what a KV cache holds, keys before RoPE, and of the gradients of the loss there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.weights import AttentionWeights
from headwise.linalg.attention import Attention
from headwise.linalg.coding import clipped, coding_basis, importance, paired_basis
from headwise.linalg.spectra import Basis
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape, ModelShape
from headwise.tracing.turns import Turns, turns_alike

WHOLE = 1  # first tokens of a sequence, which a cache keeps whole: they have statistics of their own
PARTS, BOTH = ("k", "v"), "kv"


def packable(model: PreTrainedModel, shape: ModelShape) -> list[bool]:
    """For each layer whether its cache can be packed: every token is cached, and RoPE can be undone."""
    possible = turns_alike(model) and not shape.source_tokens
    return [possible and can_pack(layer) for layer in shape.layers]


def can_pack(layer: LayerShape) -> bool:
    """Whether a layer of this shape caches the keys and values of every token, or a latent and a shared key."""
    every = bool(layer.heads) and layer.cache == "tokens" and layer.window is None and not layer.absorbed
    return every and (layer.latent is None or layer.latent.rope_dim > 0)


def add_cached(sums: Sums, layer: LayerShape, k_BGSK: Tensor, v_BGSV: Tensor) -> None:
    """Add means and second moments of keys before RoPE, of values, and of both together."""
    for name, x_ANC in _parts(layer, _tokens(k_BGSK.float()), _tokens(v_BGSV.float())).items():
        sums.add(f"cached_{name}_mean", x_ANC.sum(1), x_ANC.shape[1])
        sums.add(f"cached_{name}_moment", x_ANC.mT @ x_ANC, x_ANC.shape[1])


def watch_gradients(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add second moments of the gradients by keys before RoPE and by values, as they come: as they are, and clipped."""
    then = copy.copy(turns)  # gradients come when other turns may be running
    add = gradient_sums(sums, layer)
    attention.k_BGSK.register_hook(lambda gradient: add("k", then.gradient(gradient.float(), pairs_GP)))
    attention.v_BGSV.register_hook(lambda gradient: add("v", gradient))


def gradient_sums(sums: Sums, layer: LayerShape) -> Callable[[str, Tensor], None]:
    """A function that takes the gradients of one pass by keys before RoPE ("k") and by values ("v"), and adds them."""
    gradients: dict[str, Tensor] = {}

    def add(name: str, gradient_BGSC: Tensor) -> None:
        gradients[name] = _tokens(gradient_BGSC.float())
        if len(gradients) < len(PARTS) or not len(gradients[name]):
            return
        keys, values = (gradients.pop(part) for part in PARTS)
        for kind, both in (("gradient", (keys, values)), ("clipped", (clipped(keys), clipped(values)))):
            for part, g_ANC in _parts(layer, *both).items():
                sums.add(f"cached_{part}_{kind}", g_ANC.mT @ g_ANC, g_ANC.shape[1])

    return add


def coded_bases(
    layer: LayerShape, sums: Sums, weights: AttentionWeights, *, neighbours: bool = False
) -> dict[str, Basis]:
    """In which coordinates keys ("k"), values ("v"), and both together ("kv") are rounded.

    Values of a group of heads may be mixed at will, RoPE pairs only be turned, keys behind a norm not be touched at
    all. Together anything goes: keys are made again when they are read, and where no norm stands behind them, keys and
    values of many heads are more numbers than the inputs that ``weights`` make them of. Latent attention has no such
    third: its latent is both. ``neighbours`` says that the coordinates of a RoPE pair are side by side.
    """
    of_heads, layer = not layer.latent, layer.cached
    k, v = (_centred(sums, name) for name in PARTS)
    keys = torch.eye(layer.qk_dim, dtype=torch.float64).repeat(layer.kv_heads, 1, 1)
    directions, duals = keys.clone(), keys.clone()
    if layer.norm == "none":
        R = layer.rotary
        directions[:, :R, :R] = duals[:, :R, :R] = paired_basis(k[:, :R, :R], neighbours=neighbours)
        if layer.qk_dim > R:
            free = coding_basis(k[:, R:, R:], sums.mean("cached_k_clipped")[:, R:, R:])
            directions[:, R:, R:], duals[:, R:, R:] = free.directions_NRR, free.duals_NRR
    values = torch.ones(layer.kv_heads, layer.qk_dim, dtype=torch.float64)
    bases = {"k": Basis(values, directions, duals), "v": coding_basis(v, sums.mean("cached_v_clipped"))}
    if of_heads:
        sizes = tuple(width * layer.kv_heads // layer.value_groups for width in (layer.qk_dim, layer.v_dim))
        metric, rows = sums.mean(f"cached_{BOTH}_clipped"), _joint_weights(layer, weights)
        bases[BOTH] = coding_basis(_centred(sums, BOTH), metric, sizes, rows)
    return bases


def _joint_weights(layer: LayerShape, weights: AttentionWeights) -> Tensor | None:
    """What makes keys and values of groups, (groups, width, D); None where a norm stands behind keys."""
    if layer.norm != "none":
        return None
    both = (w.detach().cpu().unflatten(0, (layer.value_groups, -1)) for w in (weights.w_k_GKD, weights.w_v_GVD))
    return torch.cat([w.flatten(1, 2) for w in both], dim=1)


def importances(bases: dict[str, Basis], sums: Sums) -> dict[str, Tensor]:
    """What losing each coordinate of keys (heads, K), values (groups, width) and both (groups, width) would cost."""
    return {
        name: importance(basis, _centred(sums, name), sums.mean(f"cached_{name}_gradient"))
        for name, basis in bases.items()
    }


def _tokens(x_BGSC: Tensor) -> Tensor:
    """All tokens but the first ones, (tokens, heads, coordinates)."""
    return x_BGSC[:, :, WHOLE:].transpose(1, 2).flatten(0, 1)


def _parts(layer: LayerShape, k_NGK: Tensor, v_NGV: Tensor) -> dict[str, Tensor]:
    """In double precision keys by heads, values by groups of heads, and both by groups: (groups, tokens, width)."""
    keys, values = (x.double() for x in (k_NGK, v_NGV))
    groups = layer.cached.value_groups
    grouped = [x.unflatten(1, (groups, -1)).flatten(2).transpose(0, 1) for x in (keys, values)]
    parts = {"k": keys.transpose(0, 1), "v": grouped[1]}
    return parts if layer.latent else {**parts, BOTH: torch.cat(grouped, dim=2)}


def _centred(sums: Sums, name: str) -> Tensor:
    mean = sums.mean(f"cached_{name}_mean")
    return sums.mean(f"cached_{name}_moment") - mean[:, :, None] * mean[:, None, :]
