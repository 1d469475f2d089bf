"""Second moments of what blocks of key/value heads cache, and of the gradients there, the first tokens among them.

A cache that holds latents alone has no room for a first token in full, which heads that have nothing to look for look
at: its moment counts as much as its gradients are larger than others'.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headwise.linalg.absorbed import BlockLayout, Moments, latent_basis, pair_basis
from headwise.linalg.attention import Attention
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape
from headwise.tracing.coded import BOTH, PARTS, WHOLE
from headwise.tracing.turns import Turns


def add_first(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add the mean and second moment of the first tokens, which `headwise.tracing.coded` leaves out."""
    first = _blocks(layer, turns.back(attention.k_BGSK.float(), pairs_GP), attention.v_BGSV.float())
    sums.add("first_mean", first.sum(1), first.shape[1])
    sums.add("first_moment", first.mT @ first, first.shape[1])


def watch_first(sums: Sums, layer: LayerShape, attention: Attention, turns: Turns, pairs_GP: Tensor | None) -> None:
    """Add the second moment of the gradients at the first tokens, as they come."""
    then = copy.copy(turns)
    gradients: dict[str, Tensor] = {}

    def add(name: str, gradient_BGSC: Tensor) -> None:
        gradients[name] = gradient_BGSC.float()
        if len(gradients) == len(PARTS):
            first = _blocks(layer, *(gradients.pop(part) for part in PARTS))
            sums.add("first_gradient", first.mT @ first, first.shape[1])

    attention.k_BGSK.register_hook(lambda gradient: add("k", then.gradient(gradient.float(), pairs_GP)))
    attention.v_BGSV.register_hook(lambda gradient: add("v", gradient))


def block_layout(layer: LayerShape) -> BlockLayout:
    """How the numbers of a block of ``layer`` stand that is measured together."""
    return BlockLayout(layer.kv_heads // layer.value_groups, layer.qk_dim, layer.v_dim, layer.rotary)


def block_moments(sums: Sums) -> Moments:
    """The moments that were added, those of first tokens among them."""
    mean, first_mean = sums.mean(f"cached_{BOTH}_mean"), sums.mean("first_mean")
    gradient, felt = sums.mean(f"cached_{BOTH}_gradient"), sums.mean("first_gradient")
    across = first_mean[:, :, None] * mean[:, None]
    first = sums.mean("first_moment") - across - across.mT + mean[:, :, None] * mean[:, None]
    share = sums.count("first_mean") / (sums.count(f"cached_{BOTH}_mean") + sums.count("first_mean"))
    energy, first_energy = (m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (gradient, felt))
    weight = share * first_energy / energy.clamp(min=torch.finfo(energy.dtype).tiny)
    second = sums.mean(f"cached_{BOTH}_moment") + weight[:, None, None] * first
    return Moments(mean, second, sums.mean(f"cached_{BOTH}_clipped"))


def importances(
    layer: LayerShape, moments: Moments, weights_MWD: Tensor, freed: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """What losing each coordinate would cost: of RoPE pairs (M, P J), and of latents (M, W).

    The latter once for each number ``freed`` of the slowest pairs that have lost their position.
    """
    layout, latents = block_layout(layer), []
    for count in freed:
        importance = latent_basis(moments, layout, slowest(layer, count), weights_MWD).values_NR
        width = moments.mean_MW.shape[1]
        latents.append(torch.nn.functional.pad(importance, (0, width - importance.shape[1])))
    return pair_basis(moments, layout).importance_MPJ.flatten(1), latents


def slowest(layer: LayerShape, count: int) -> tuple[int, ...]:
    """The ``count`` RoPE pairs of the lowest frequencies."""
    half = layer.rotary // 2
    return tuple(range(half - count, half))


def _blocks(layer: LayerShape, k_BGSK: Tensor, v_BGSV: Tensor) -> Tensor:
    """Keys of all heads of each block, then values, of the first tokens: (blocks, tokens, width)."""
    first = (x[:, :, :WHOLE].double().transpose(1, 2).flatten(0, 1) for x in (k_BGSK, v_BGSV))
    parts = (x.unflatten(1, (layer.value_groups, -1)) for x in first)
    return torch.cat([part.flatten(2) for part in parts], dim=-1).transpose(0, 1)
