"""Which plans a stock class of transformers can express, and the config that does it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.family import Mlp
from headwise.families.known import family_of
from headwise.families.mlp import stock_channels
from headwise.families.sites import base_type, sites_of
from headwise.records.change import Pairs
from headwise.records.plan import Changes, Plan, changed
from headwise.records.shape import LayerShape, ModelShape
from headwise.reduction.config import entry_of

FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not change with the length of the text


def stock_config(model: PreTrainedModel, shape: ModelShape, plan: Plan) -> PreTrainedConfig | str:
    """The config of a plain transformers model that has the shapes of ``plan``, or the reason why there is none."""
    config = model.config
    after = plan.after(shape)
    kept = [
        (shape.layers[run[0]], layer, _joined_pairs([(shape.layers[number], plan.layers[number]) for number in run]))
        for run in plan.made_of()
        if (layer := after[run[0]]) is not None
    ]
    if getattr(config, "headwise", None):
        return "the model has per-layer shapes already"
    if any(not layer.heads for _, layer, _ in kept):
        return "some layers have no attention"
    if any(map(entry_of, plan.layers)):
        return "its changes say more of its layers than a stock config can"
    if any(layer.absorbed for _, layer, _ in kept):
        return "its layers cache latents"
    shortened = copy.deepcopy(config)
    shortened.__dict__.pop("auto_map", None)  # of a repository that also brings code of its own
    if len(kept) < len(after):
        shortened.num_hidden_layers = len(kept)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            shortened.layer_types = [kind for kind, layer in zip(kinds, after, strict=True) if layer is not None]
    if (reason := _state_channels(model, shortened, after)) is not None:
        return reason
    if all(_attention(before) == _attention(layer) for before, layer, _ in kept):
        return shortened
    if len({layer.dims for _, layer, _ in kept}) > 1 or len(family_of(base_type(config)).stacks) > 1:
        return "its layers differ in shape"
    before, layer, _ = kept[0]
    return _other_heads(model, shortened, before.rotary, layer, [pairs for _, _, pairs in kept])


def _state_channels(model: PreTrainedModel, config: PreTrainedConfig, after: Sequence[LayerShape | None]) -> str | None:
    """Put the channels of all MLPs into ``config``; the reason where it cannot say them."""
    channels: dict[Mlp, set[int]] = {}
    for site, layer in zip(sites_of(model), after, strict=True):
        if layer is not None and site.stack.mlp is not None:
            channels.setdefault(site.stack.mlp, set()).add(0 if layer.mlp is None else layer.mlp.channels)
    for spec, counts in channels.items():
        if counts == {stock_channels(config, spec)}:
            continue
        if 0 in counts:
            return "some layers have no MLP"
        if len(counts) > 1:
            return "its MLPs differ in width"
        setattr(config, spec.width, counts.pop())
    return None


def _attention(layer: LayerShape) -> LayerShape:
    """What a layer is apart from its MLP and from how its cache is packed."""
    return replace(layer, packed=None, mlp=None, rest_parameters=0, rest_matmul=0)


def _joined_pairs(members: Sequence[tuple[LayerShape, Changes]]) -> Pairs | None:
    """The RoPE pairs of all heads of the blocks a layer is made of; None where that cannot be told of each of them."""
    changed_to = [(before, changes, changed(before, changes)) for before, changes in members]
    named = [
        _pairs(before, changes, after) for before, changes, after in changed_to if after is not None and after.heads
    ]
    known = [pairs for pairs in named if pairs is not None]
    return tuple(each for pairs in known for each in pairs) if len(known) == len(named) else None


def _pairs(before: LayerShape, changes: Changes, layer: LayerShape) -> Pairs | None:
    """The RoPE pairs that a layer keeps; None where that takes more than one of its changes to tell."""
    named = [pairs for change in changes if (pairs := change.kept_pairs()) is not None]
    if not named and layer.rotary == before.rotary:
        return (tuple(range(before.rotary // 2)),)
    return named[0] if len(named) == 1 else None


def _other_heads(
    model: PreTrainedModel, config: PreTrainedConfig, rotary: int, layer: LayerShape, pairs: list[Pairs | None]
) -> PreTrainedConfig | str:
    family = family_of(base_type(config))
    if not family.head_dim:
        return f"{config.model_type} configs cannot state a head width of their own"
    if layer.qk_dim != layer.v_dim:
        return "queries/keys and values differ in width"
    if layer.heads != layer.kv_heads and not hasattr(config, "num_key_value_heads"):
        return f"{config.model_type} has no grouped key/value heads"
    if layer.norm == "per-head":
        return "its heads have norms of their own"
    lists = {tuple(sorted(own)) for each in pairs for own in each or ()}
    if rotary and (None in pairs or lists != {tuple(range(rotary // 2))}):
        if len(lists) != 1 or None in pairs:
            return "its heads keep different RoPE pairs"
        if layer.rotary != layer.qk_dim:
            return "its heads keep dimensions that do not turn"
        if not family.rope_list or config.rope_parameters.get("rope_type") not in FIXED_ROPE:
            return f"{config.model_type} with this kind of RoPE cannot list its frequencies"
        config.rope_parameters = _listed_frequencies(model, config, list(lists.pop()))
    config.num_attention_heads = layer.heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = layer.kv_heads
    config.head_dim = layer.qk_dim
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
