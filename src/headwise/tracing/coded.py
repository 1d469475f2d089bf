"""Second moments of what a KV cache holds, keys before RoPE, and of the gradients of the loss there."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.linalg.attention import Attention
from headwise.linalg.coding import clipped, coding_basis, importance, paired_basis
from headwise.linalg.spectra import Basis
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape, ModelShape
from headwise.tracing.turns import Turns, turns_alike

WHOLE = 1  # first tokens of a sequence, which a cache keeps whole: they have statistics of their own
PARTS = ("k", "v")


def packable(model: PreTrainedModel, shape: ModelShape) -> list[bool]:
    """For each layer whether its cache can be packed: every token is cached, and RoPE can be undone."""
    possible = turns_alike(model) and not shape.source_tokens
    return [possible and can_pack(layer) for layer in shape.layers]


def can_pack(layer: LayerShape) -> bool:
    """Whether a layer of this shape caches the keys and values of every token."""
    return bool(layer.heads) and layer.cache == "tokens" and layer.window is None and layer.latent is None


def add_cached(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add means and second moments of keys before RoPE and of values, those of a group of heads together."""
    keys = turns.back(attention.k_BGSK.float(), pairs_GP)
    for name, x_BGSC in zip(PARTS, (keys, attention.v_BGSV.float()), strict=True):
        x_ANC = _grouped(name, x_BGSC[:, :, WHOLE:].transpose(1, 2).flatten(0, 1), layer)
        sums.add(f"cached_{name}_mean", x_ANC.sum(1), x_ANC.shape[1])
        sums.add(f"cached_{name}_moment", x_ANC.mT @ x_ANC, x_ANC.shape[1])


def watch_gradients(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add second moments of the gradients by keys before RoPE and by values, as they come: as they are, and clipped."""
    then = copy.copy(turns)  # gradients come when other turns may be running

    def add(name: str, gradient_BGSC: Tensor) -> None:
        g_NGC = gradient_BGSC[:, :, WHOLE:].float().transpose(1, 2).flatten(0, 1)
        if not len(g_NGC):
            return
        for kind, g in (("gradient", g_NGC), ("clipped", clipped(g_NGC))):
            each_ANC = _grouped(name, g, layer)
            sums.add(f"cached_{name}_{kind}", each_ANC.mT @ each_ANC, len(g))

    def see_keys(gradient: Tensor) -> None:
        add("k", then.gradient(gradient.float(), pairs_GP))

    attention.k_BGSK.register_hook(see_keys)
    attention.v_BGSV.register_hook(lambda gradient: add("v", gradient))


def coded_bases(layer: LayerShape, sums: Sums) -> dict[str, Basis]:
    """In which coordinates keys ("k") and values ("v") are rounded.

    Values of a group of heads may be mixed at will, RoPE pairs only be turned, keys behind a norm not be touched at
    all.
    """
    k, v = (_centred(sums, name) for name in PARTS)
    keys = torch.eye(layer.qk_dim, dtype=torch.float64).repeat(layer.kv_heads, 1, 1)
    directions, duals = keys.clone(), keys.clone()
    if layer.norm == "none":
        R = layer.rotary
        directions[:, :R, :R] = duals[:, :R, :R] = paired_basis(k[:, :R, :R])
        if layer.qk_dim > R:
            free = coding_basis(k[:, R:, R:], sums.mean("cached_k_clipped")[:, R:, R:])
            directions[:, R:, R:], duals[:, R:, R:] = free.directions_NRR, free.duals_NRR
    values = torch.ones(layer.kv_heads, layer.qk_dim, dtype=torch.float64)
    return {"k": Basis(values, directions, duals), "v": coding_basis(v, sums.mean("cached_v_clipped"))}


def importances(bases: dict[str, Basis], sums: Sums) -> dict[str, Tensor]:
    """What losing each coordinate of keys (heads, K) and values (groups, width) would cost."""
    return {name: importance(bases[name], _centred(sums, name), sums.mean(f"cached_{name}_gradient")) for name in PARTS}


def _grouped(name: str, x_NGC: Tensor, layer: LayerShape) -> Tensor:
    """In double precision keys by heads, values by groups of heads: (groups, tokens, width)."""
    groups = layer.value_groups if name == "v" else layer.kv_heads
    return x_NGC.double().flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)


def _centred(sums: Sums, name: str) -> Tensor:
    mean = sums.mean(f"cached_{name}_mean")
    return sums.mean(f"cached_{name}_moment") - mean[:, :, None] * mean[:, None, :]
