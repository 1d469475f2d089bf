"""Which plans a stock class of transformers can express, and the config that does it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.known import family_of
from headwise.families.sites import base_type
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import ModelShape

FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not change with the length of the text


def stock_config(model: PreTrainedModel, shape: ModelShape, plan: Plan) -> PreTrainedConfig | str:
    """The config of a plain transformers model that has the shapes of ``plan``, or the reason why there is none."""
    config = model.config
    kept = [(layer, change) for layer, change in zip(shape.layers, plan.layers, strict=True) if not change.dropped]
    dims = {(change.heads, change.kv_heads, change.qk_dim, change.v_dim) for _, change in kept}
    if getattr(config, "headwise", None):
        return "the model has per-layer shapes already"
    if any(not change.heads for _, change in kept):
        return "some layers have no attention"
    shortened = copy.deepcopy(config)
    shortened.__dict__.pop("auto_map", None)  # of a repository that also brings code of its own
    if len(kept) < len(shape.layers):
        shortened.num_hidden_layers = len(kept)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            shortened.layer_types = [k for k, c in zip(kinds, plan.layers, strict=True) if not c.dropped]
    if all(LayerPlan.full(layer) == replace(change, rope_pairs=None, kept_heads=None) for layer, change in kept):
        return shortened
    if len(dims) > 1 or len(family_of(base_type(config)).stacks) > 1:
        return "its layers differ in shape"
    return _smaller_heads(model, shortened, kept[0][0].rotary, [change for _, change in kept])


def _smaller_heads(
    model: PreTrainedModel, config: PreTrainedConfig, rotary: int, kept: list[LayerPlan]
) -> PreTrainedConfig | str:
    family = family_of(base_type(config))
    change = kept[0]
    if not family.head_dim:
        return f"{config.model_type} configs cannot state a head width of their own"
    if change.qk_dim != change.v_dim:
        return "queries/keys and values differ in width"
    if change.heads != change.kv_heads and not hasattr(config, "num_key_value_heads"):
        return f"{config.model_type} has no grouped key/value heads"
    if rotary and change.qk_dim < rotary:
        sets = {frozenset(pairs) for each in kept for pairs in each.rope_pairs or ()}
        if len(sets) != 1 or any(each.rope_pairs is None for each in kept):
            return "its heads keep different RoPE pairs"
        if not family.rope_list or config.rope_parameters.get("rope_type") not in FIXED_ROPE:
            return f"{config.model_type} with this kind of RoPE cannot list its frequencies"
        config.rope_parameters = _listed_frequencies(model, config, sorted(sets.pop()))
    config.num_attention_heads = change.heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = change.kv_heads
    config.head_dim = change.qk_dim
    try:
        config.validate()
    except StrictDataclassError as error:
        return f"{config.model_type} configs refuse it ({error.__cause__ or error})"
    return config


def _listed_frequencies(model: PreTrainedModel, config: PreTrainedConfig, pairs: list[int]) -> dict:
    """RoPE parameters that give just the frequencies of ``pairs``: LongRoPE divides each by a factor of its own."""
    rotary = cast(Any, model.base_model).rotary_emb
    base = float(config.rope_parameters["rope_theta"])
    factors = _factors(rotary.inv_freq.float().cpu()[pairs], base)
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": float(rotary.attention_scaling),
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _factors(wanted_P: Tensor, base: float) -> list[float]:
    """Factors that give ``wanted_P`` to the last bit in the float32 arithmetic of transformers."""
    powers = base ** (torch.arange(0, 2 * len(wanted_P), 2, dtype=torch.int64).float() / (2 * len(wanted_P)))
    best = 1.0 / (wanted_P * powers)
    for direction in (float("inf"), -float("inf")):
        tried = 1.0 / (wanted_P * powers)
        for _ in range(8):
            better = (1.0 / (tried * powers) - wanted_P).abs() < (1.0 / (best * powers) - wanted_P).abs()
            best = torch.where(better, tried, best)
            tried = torch.nextafter(tried, torch.tensor(direction))
    return best.tolist()
