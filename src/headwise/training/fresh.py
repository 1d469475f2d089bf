"""A plan of `headwise design` in, the model it describes out, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.checkpoints.load import empty_model
from headwise.families.reduced import per_layer_class_of
from headwise.families.shapes import rotary_width, shape_of
from headwise.families.sites import sites_of
from headwise.records.blueprint import Images
from headwise.records.plan import Plan
from headwise.records.shape import ModelShape
from headwise.reduction.config import per_layer_config

STOCK = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
}


def fresh_model(plan: Plan, seed: int = 0) -> PreTrainedModel:
    """The model that the blueprint in ``plan`` describes, in float32, initialised as transformers does for its family.

    A stock class of transformers where one allows these shapes, headwise's per-layer class otherwise. Every head scales
    its logits by its own width, and its RoPE frequencies are those of a stock head as wide as it is, where that width
    divides the widest head of the model. The random state of the caller stays as it is.
    """
    shape = plan.shape_to_build()
    cls, config = _class_and_config(plan, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
        if getattr(config, "headwise", None):
            # transformers leaves out modules without weights of their own in custom classes, among them those that give
            # GPT-2's residual projections their smaller start.
            model.apply(model._init_weights)
    _spread_pairs(model, shape)
    return model


def _class_and_config(plan: Plan, shape: ModelShape) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    config_class, stock_class = (getattr(transformers, name) for name in STOCK[plan.family])
    first = shape.layers[0]
    if _stock_can_say(plan, shape):
        return stock_class, config_class(**_numbers(plan, first.heads, first.kv_heads, first.qk_dim))
    heads = max(layer.heads for layer in shape.layers)
    widest = max(layer.qk_dim for layer in shape.layers)
    stated = next(count for count in range(heads, 0, -1) if plan.width % count == 0)  # stock code wants a divisor
    dense = empty_model(stock_class, config_class(**_numbers(plan, stated, stated, widest)))
    config = per_layer_config(dense, shape_of(dense), shape.layers, [()] * len(shape.layers))
    for entry in config.headwise["layers"]:
        if entry["heads"]:
            entry["scale"] = entry["qk_dim"] ** -0.5
    return per_layer_class_of(dense), config


def _stock_can_say(plan: Plan, shape: ModelShape) -> bool:
    first = shape.layers[0]
    if (
        any(layer.dims != first.dims for layer in shape.layers)
        or first.qk_dim != first.v_dim
        or plan.width % first.heads
    ):
        return False
    if plan.family == "llama":
        return True
    inner = first.heads * first.qk_dim
    return first.heads == first.kv_heads and (plan.family == "vit" or inner == plan.width)


def _numbers(plan: Plan, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """The config of a stock model with one kind of attention for all layers."""
    blueprint = plan.require_blueprint()
    reads = blueprint.reads
    common = {"hidden_size": plan.width, "num_hidden_layers": len(plan.layers), "num_attention_heads": heads}
    if isinstance(reads, Images):
        return {
            **common,
            "head_dim": head_dim,
            "intermediate_size": blueprint.mlp,
            "image_size": reads.size,
            "patch_size": reads.patch,
            "num_channels": reads.channels,
            "num_labels": reads.labels,
        }
    text = {
        **common,
        "vocab_size": reads.vocab,
        "max_position_embeddings": reads.context,
        "tie_word_embeddings": reads.tied,
        "bos_token_id": None,  # the tokenizer's to say
        "eos_token_id": None,
    }
    if plan.family == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # as its kin are trained today
        return {**text, **dropouts, "n_inner": blueprint.mlp}
    return {
        **text,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": blueprint.mlp,
    }


def _spread_pairs(model: PreTrainedModel, shape: ModelShape) -> None:
    """Give heads narrower than the widest every n-th of its RoPE frequencies, from the fastest on."""
    full = rotary_width(model) // 2
    for site, layer in zip(sites_of(model), shape.layers, strict=True):
        pairs = getattr(site.module, "rope_pairs", None)
        if pairs is not None:
            kept = layer.rotary // 2
            pairs.copy_((torch.arange(kept) * full // kept).expand_as(pairs))
