"""What llama.cpp runs of a model: an architecture, the shapes of its blocks, and their tensors one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.checkpoints.gguf.places import Places, placed, places_for
from headwise.families.mlp import mlp_of, read_mlp
from headwise.families.shapes import shape_of
from headwise.families.sites import Site, base_type, sites_of
from headwise.families.weights import AttentionWeights, read_attention
from headwise.files.errors import InputError

FAMILIES = ("llama", "mistral")
FIXED = ("default", "linear", "llama3", "yarn")  # RoPE whose frequencies stay as they are
SAME = 1e-6  # factors this close to 1 are left out


@dataclass(frozen=True, slots=True)
class Blocks:
    """Heads, key/value heads and channels of each block, and where the coordinates of a head stand."""

    model: PreTrainedModel
    places: Places
    heads: list[int]
    kv_heads: list[int]
    channels: list[int]

    @property
    def architecture(self) -> str:
        """``llama`` where all blocks are alike; ``deci`` lists heads and channels by block, 0 for none."""
        alike = all(len(set(counts)) == 1 for counts in (self.heads, self.kv_heads, self.channels))
        return "llama" if alike and self.channels[0] else "deci"

    @property
    def cached_numbers(self) -> int:
        """Numbers that llama.cpp caches for one token."""
        return 2 * self.places.width * sum(self.kv_heads)

    def factors(self) -> Tensor | None:
        """What llama.cpp divides its frequencies by; None where they are right as they are."""
        rotary = _rotary(self.model)
        base = self.model.config.rope_parameters["rope_theta"]
        factors = self.places.factors(rotary.inv_freq.cpu(), base).float()
        return None if (factors - 1).abs().max() < SAME else factors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by their names in GGUF, matrices as (out, in), in float32."""
        base: Any = self.model.base_model
        yield "token_embd.weight", _plain(base.embed_tokens.weight)
        yield "output_norm.weight", _plain(base.norm.weight)
        if not self.model.config.tie_word_embeddings:
            yield "output.weight", _plain(cast(Any, self.model.get_output_embeddings()).weight)
        if (factors := self.factors()) is not None:
            yield "rope_freqs.weight", factors
        for number, (site, weights) in enumerate(_attention(self.model)):
            for name, tensor in self._block(site, weights, number):
                yield f"blk.{number}.{name}", tensor

    def _block(self, site: Site, weights: AttentionWeights | None, number: int) -> Iterator[tuple[str, Tensor]]:
        if self.heads[number]:
            if weights is None:
                weights, norm = _silent(self.model.config.hidden_size), torch.ones(self.model.config.hidden_size)
            else:
                norm = _norm(site, "input_layernorm")
            yield "attn_norm.weight", norm
            yield from placed(weights, self.places, _rotary(self.model).attention_scaling ** 2).items()
        mlp = mlp_of(site)
        if mlp is not None and self.channels[number]:
            ffn = read_mlp(mlp)
            yield "ffn_norm.weight", _norm(site, "post_attention_layernorm")
            parts = (("ffn_gate", ffn.w_gate_MD), ("ffn_up", ffn.w_up_MD), ("ffn_down", ffn.w_down_MD.T))
            yield from ((f"{name}.weight", _plain(part)) for name, part in parts if part is not None)


def blocks_of(model: PreTrainedModel) -> Blocks:
    """What llama.cpp can run of ``model``; raises where it could not compute the same."""
    _check(model)
    attention = [weights for _, weights in _attention(model)]
    kept = [weights for weights in attention if weights is not None]
    heads = [0 if weights is None else len(weights.w_q_HKD) for weights in attention]
    kv_heads = [0 if weights is None else len(weights.w_k_GKD) for weights in attention]
    if not heads[0]:
        heads[0] = kv_heads[0] = 1  # llama.cpp takes the sizes of heads from the first block
    mlps = [layer.mlp for layer in shape_of(model).layers]
    channels = [0 if mlp is None else mlp.channels for mlp in mlps]
    return Blocks(model, places_for(kept), heads, kv_heads, channels)


def _attention(model: PreTrainedModel) -> Iterator[tuple[Site, AttentionWeights | None]]:
    for site, layer in zip(sites_of(model), shape_of(model).layers, strict=True):
        yield site, read_attention(site, layer.rotary) if layer.heads else None


def _check(model: PreTrainedModel) -> None:
    config, family = model.config, base_type(model.config)
    if family not in FAMILIES or model.get_output_embeddings() is None:
        raise InputError(
            f"GGUF export knows Llama- and Mistral-type language models; this is {type(model).__name__} ({family})."
        )
    if any(layer.absorbed for layer in shape_of(model).layers):
        raise InputError("llama.cpp caches keys and values; this model caches latents in their stead.")
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    listed = kind == "longrope" and rope["short_factor"] == rope["long_factor"]
    if kind not in FIXED and not listed:
        raise InputError(f"GGUF export needs RoPE with fixed frequencies; this model's change with length ({kind}).")
    if getattr(config, "sliding_window", None) is not None and config.sliding_window < config.max_position_embeddings:
        raise InputError("llama.cpp runs Llama-type models without sliding windows; this model has one.")
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        raise InputError("llama.cpp runs Llama-type models with SiLU and no biases in the MLP; this model differs.")


def _silent(width: int) -> AttentionWeights:
    """One head that adds nothing."""
    none = torch.zeros(1, 0, width)
    return AttentionWeights(none, none, none, none, scale=1.0)


def _rotary(model: PreTrainedModel) -> Any:
    return cast(Any, model.base_model).rotary_emb


def _norm(site: Site, name: str) -> Tensor:
    return _plain(cast(Tensor, site.block.get_submodule(name).weight))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()
