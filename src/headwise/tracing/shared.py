"""Second moments between key/value heads, and how much the loss would feel each unit of merged ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.linalg.attention import Attention
from headwise.linalg.masks import CAUSAL_BLOCK, add_coherence, block_sums, coherence
from headwise.linalg.sharing import SharedBasis, SharedMoments, shared_basis, shared_moments, split_blocks
from headwise.linalg.sums import Sums
from headwise.records.shape import LayerShape

ROWS = 256  # rows of each attention map whose averages of values count
KINDS = ("k", "v")
Bases = dict[int, SharedBasis]  # by the number of heads that are merged into one


def add_between_heads(sums: Sums, layer: LayerShape, attention: Attention) -> None:
    """Add moments of keys between the heads of a block, and of all its values as each query head averages them."""
    blocks = layer.value_groups
    length = attention.q_BHTK.shape[2]
    rows = torch.linspace(0, length - 1, min(ROWS, length), device=attention.q_BHTK.device).round().long()
    a_BAhRS = attention.logits(slice(None), rows).softmax(-1).unflatten(1, (blocks, -1))
    v_BAJSV = attention.v_BGSV.float().unflatten(1, (blocks, -1))
    averaged = torch.einsum("bahrs,bajsv->ajbhrv", a_BAhRS, v_BAJSV).flatten(2, 4)
    keys = _in_blocks(attention.k_BGSK, blocks)
    moments = shared_moments(keys, averaged, layer.rotary)
    sums.add("shared_pairs", torch.view_as_real(moments.pairs_MPJJ), keys.shape[2])
    sums.add("shared_free", moments.free_MFF, keys.shape[2])
    sums.add("shared_v", moments.values_MVV, averaged.shape[2])


def between_heads(layer: LayerShape, sums: Sums) -> dict[str, Tensor]:
    """Those moments as a profile holds them, of keys about their mean."""
    mean = sums.mean("k_mean").unflatten(0, (layer.value_groups, -1))[:, :, None]
    centre = shared_moments(mean, sums.mean("k_mean").new_zeros(*mean.shape[:3], layer.v_dim), layer.rotary)
    tensors = {
        "shared_pair_moment": sums.mean("shared_pairs") - torch.view_as_real(centre.pairs_MPJJ),
        "shared_free_moment": sums.mean("shared_free") - centre.free_MFF,
        "shared_v_moment": sums.mean("shared_v"),
        "q_moment": sums.mean("q_moment"),
    }
    return {name: tensor.float() for name, tensor in tensors.items()}


def measured_basis(measured: Mapping[str, Tensor], joined: int, gram_GVV: Tensor) -> SharedBasis:
    """The basis of so many heads merged, from the moments of a profile and the Gram matrices of the output weights."""
    moments = SharedMoments(
        torch.view_as_complex(measured["shared_pair_moment"].double().contiguous()),
        measured["shared_free_moment"].double(),
        measured["shared_v_moment"].double(),
    )
    queries = measured["q_moment"].double().unflatten(0, (len(gram_GVV), -1)).sum(1)
    return shared_basis(split_blocks(moments, joined), queries, gram_GVV)


def watch_units(sums: Sums, attention: Attention, bases: Bases, drawn: list[int]) -> None:
    """Add the Fisher information of the units of merged heads when gradients come; ``drawn`` then counts outputs."""
    keys, values = attention.k_BGSK.detach(), attention.v_BGSV.detach()
    mean = sums.mean("k_mean")[:, None].to(keys.device)

    def add(kind: str, joined: int, parts_MNU: Tensor) -> None:
        parts_BMTU = parts_MNU.unflatten(1, (len(keys), -1)).transpose(0, 1)
        sample, name = block_sums(parts_BMTU, CAUSAL_BLOCK).double(), f"shared{joined}_{kind}"
        sums.add(f"{name}_fisher", sample.square().sum(0).flatten(), drawn[0])
        add_coherence(sums, name, sample, len(keys), drawn[0])

    def see_keys(gradient: Tensor) -> None:
        centred = (keys.double() - mean).float()
        for joined, basis in bases.items():
            blocks = len(gradient[0]) // joined
            add("k", joined, basis.units(_in_blocks(centred, blocks), _in_blocks(gradient.float(), blocks)))

    def see_values(gradient: Tensor) -> None:
        for joined, basis in bases.items():
            blocks = len(gradient[0]) // joined
            parts = basis.value_units(_in_blocks(values.float(), blocks), _in_blocks(gradient.float(), blocks))
            add("v", joined, parts)

    attention.k_BGSK.register_hook(see_keys)
    attention.v_BGSV.register_hook(see_values)


def unit_damage(layer: LayerShape, sums: Sums) -> dict[str, Tensor]:
    """Half the Fisher information of the units of keys and of values, (numbers of merged heads, units of all heads)."""
    damage = {}
    for kind in KINDS:
        names = [f"shared{joined}_{kind}" for joined in layer.joinable]
        damage[kind] = torch.stack([sums.mean(f"{name}_fisher") / 2 * coherence(sums, name) for name in names])
    return damage


def _in_blocks(x_BGTC: Tensor, blocks: int) -> Tensor:
    """(blocks, heads of each, B T, C)"""
    return x_BGTC.transpose(0, 1).flatten(1, 2).unflatten(0, (blocks, -1))
