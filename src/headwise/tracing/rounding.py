"""Running a model as if its keys and values had passed through a packed cache: for evaluation and for training."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise.families.sites import sites_of
from headwise.runtime.cache import CacheSpec, LayerCodes
from headwise.runtime.modeling_headwise import grouped_attention, padded_attention
from headwise.tracing.interface import attending
from headwise.tracing.latents import rounding_latents
from headwise.tracing.turns import turning


@contextmanager
def rounding(model: PreTrainedModel, cache: CacheSpec | None) -> Generator[None, None, None]:
    """In the block every token reads keys and values as ``cache`` holds them; gradients pass through unrounded.

    The first tokens of a sequence (by position) are whole, as in the cache. Without a cache nothing happens.
    """
    if cache is None:
        yield
        return
    before = model.config._attn_implementation or "sdpa"
    backend = ALL_ATTENTION_FUNCTIONS.get_interface(before, grouped_attention)

    placed: dict[int, LayerCodes] = {}
    sites = sites_of(model)
    latents = {int(site.module.layer_idx) for site in sites if site.family.latent and not site.removed}
    heads = {number: codes for number, codes in cache.layers.items() if number not in latents}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        number = int(module.layer_idx)
        if number in heads:
            if number not in placed:
                placed[number] = heads[number].to(k.device)
            codes, pairs = placed[number], getattr(module, "rope_pairs", None)
            given = (x.transpose(1, 2) for x in (turns.back(k.float(), pairs), v.float()))
            keys, values = (x.transpose(1, 2) for x in codes.round(*given))
            first = _first(kwargs.get("position_ids"), k, cache.whole)
            k, v = k.where(first, turns.on(keys, pairs).to(k.dtype)), v.where(first, values.to(v.dtype))
        if k.shape[-1] == v.shape[-1] or getattr(backend, "any_width", False):
            return backend(module, q, k, v, mask, **kwargs)
        return padded_attention(backend, module, q, k, v, mask, **kwargs)

    with (
        turning(model) as turns,
        attending(model, attend, ALL_MASK_ATTENTION_FUNCTIONS[before]),
        rounding_latents(sites, cache.layers, cache.whole),
    ):
        yield


def _first(positions: Tensor | None, k_BGTK: Tensor, whole: int) -> Tensor:
    """Where tokens are the first of their sequence, broadcastable to keys."""
    if positions is None:
        positions = torch.arange(k_BGTK.shape[2], device=k_BGTK.device)[None]
    return (positions < whole)[:, None, :, None]
