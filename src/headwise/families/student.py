"""A model and a plan in, the reduced model (the student) out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families import modeling_headwise
from headwise.families.cut import cut_attention
from headwise.families.shapes import rotary_width, shape_of
from headwise.families.sites import Site, base_type, sites_of
from headwise.families.stock import stock_config, stock_plan
from headwise.families.weights import AttentionWeights, read_attention, write_attention
from headwise.records.errors import InputError
from headwise.records.plan import LayerPlan, Plan
from headwise.records.shape import LayerShape, ModelShape

Reduce = Callable[[AttentionWeights, LayerPlan, LayerShape], AttentionWeights]
MODELING_FILE = "modeling_headwise"
Format = Literal["auto", "stock", "per-layer"]


def build_student(
    model: PreTrainedModel, plan: Plan, reduce: Reduce = cut_attention, *, form: Format = "auto"
) -> PreTrainedModel:
    """A copy of ``model`` with the attention that ``plan`` asks for; ``model`` itself is left as it is.

    ``reduce`` turns the weights of one layer into those of its planned shape. ``form`` "auto" gives a stock class of
    transformers where one can express the plan, "per-layer" headwise's own, "stock" raises where that is impossible.
    """
    shape = shape_of(model)
    plan.check(shape)
    if form == "stock":
        plan = stock_plan(model, shape, plan)
    stock = "per-layer shapes were asked for" if form == "per-layer" else stock_config(model, shape, plan)
    if form == "stock" and isinstance(stock, str):
        raise InputError(f"This plan cannot be a stock {shape.family} model: {stock}; use the per-layer format.")
    if isinstance(stock, str):
        config = student_config(model, shape, plan)
        own_class = getattr(modeling_headwise, modeling_headwise.PREFIX + _stock_class(model).__name__)
        student = _empty(own_class, config, model.dtype)
    else:
        student = _empty(_stock_class(model), stock, model.dtype)
        _rebuild_rotary(student)
    _fill_attention(model, student, shape, plan, reduce)
    _fill_rest(model, student, plan)
    if model.can_generate():
        student.generation_config = copy.deepcopy(model.generation_config)
    return student.train(model.training)


def student_config(model: PreTrainedModel, shape: ModelShape, plan: Plan) -> PreTrainedConfig:
    """The config of the reduced model: where each attention sits, its shape and its place in the cache."""
    sites = sites_of(model)
    kept = [
        (site, layer, change)
        for site, layer, change in zip(sites, shape.layers, plan.layers, strict=True)
        if not change.dropped
    ]
    config = _plain_copy(model.config)
    kinds = _drop_blocks(config, plan)
    attends = [bool(change.heads) for _, _, change in kept]
    single = len(sites[0].family.stacks) == 1
    if kinds is not None and single:
        kinds = _lend_kinds(kinds, attends)
        config.layer_types = kinds
    slots = _slots(kept, kinds if single else None)
    full_pairs = rotary_width(model) // 2
    layers = [
        _layer_entry(site, layer, change, index, slot, full_pairs)
        for index, slot, (site, layer, change) in zip(_block_indices(kept), slots, kept, strict=True)
    ]
    family = sites[0].family
    base = base_type(model.config)
    stock_class = _stock_class(model)
    config.headwise = {
        "base": base,
        "names": {"q": family.q, "k": family.k, "v": family.v, "fused": family.fused, "norms": list(family.norms)},
        "layers": layers,
    }
    config.auto_map = _auto_map(base, stock_class)
    config.architectures = [modeling_headwise.PREFIX + stock_class.__name__]
    if single:
        _state_per_layer(config, layers, shape)
    return config


def _plain_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same numbers in the config class of reduced models, without any per-layer statement."""
    content = config.to_dict()
    for name in ("per_layer_config", "model_type", "auto_map", "architectures", "headwise"):
        content.pop(name, None)
    copied = modeling_headwise.reduced_config(base_type(config))(**content)
    copied._attn_implementation = config._attn_implementation
    return copied


def _drop_blocks(config: PreTrainedConfig, plan: Plan) -> list[str] | None:
    """Shorten ``config`` by the dropped blocks; the kinds (window or full) of those that stay, if it lists them."""
    kinds = getattr(config, "layer_types", None)
    if any(change.dropped for change in plan.layers):
        if kinds is not None:
            kinds = [kind for kind, change in zip(kinds, plan.layers, strict=True) if not change.dropped]
        config.num_hidden_layers = sum(not change.dropped for change in plan.layers)
        if kinds is not None:
            config.layer_types = kinds
    return kinds


def _lend_kinds(kinds: list[str], attends: list[bool]) -> list[str]:
    """Give each layer without attention the kind of the next one with attention.

    transformers reads the cache's length from its first slot, and slots follow the layers' kinds: so the first
    slot is always one that is filled.
    """
    lent = list(kinds)
    following = next(kind for kind, attending in zip(reversed(kinds), reversed(attends), strict=True) if attending)
    for index in reversed(range(len(kinds))):
        if attends[index]:
            following = kinds[index]
        lent[index] = following
    return lent


def _slots(kept: list[tuple[Site, LayerShape, LayerPlan]], kinds: list[str] | None) -> list[int | None]:
    """Cache slot of each attention layer: the first free one of its kind, so that no gap comes before a filled slot."""
    free: dict[Any, list[int]] = {}
    for index, (site, _, _) in enumerate(kept):
        key = (site.stack, kinds[index] if kinds else None)
        free.setdefault(key, []).append(int(site.block_path.rsplit(".", 1)[1]) if not kinds else index)
    if kinds is None:
        free = {key: list(range(len(indices))) for key, indices in free.items()}
    slots: list[int | None] = []
    for index, (site, layer, change) in enumerate(kept):
        cached = change.heads and layer.cache != "none"
        slots.append(free[site.stack, kinds[index] if kinds else None].pop(0) if cached else None)
    return slots


def _block_indices(kept: list[tuple[Site, LayerShape, LayerPlan]]) -> list[int]:
    """New number of each layer's block within its own stack."""
    seen: dict[Any, int] = {}
    indices = []
    for site, _, _ in kept:
        indices.append(seen.get(site.stack, 0))
        seen[site.stack] = indices[-1] + 1
    return indices


def _layer_entry(
    site: Site, layer: LayerShape, change: LayerPlan, index: int, slot: int | None, full_pairs: int
) -> dict[str, Any]:
    block = f"{site.stack.blocks}.{index}"
    entry: dict[str, Any] = {
        "attention": f"{block}.{site.stack.attention}",
        "out": f"{block}.{site.stack.out}",
        "heads": change.heads,
    }
    if not change.heads:
        old = site.block_path
        return {**entry, "norms": [block + path.removeprefix(old) for path in site.norm_paths]}
    pairs = change.pairs(layer)
    return {
        **entry,
        "kv_heads": change.kv_heads,
        "qk_dim": change.qk_dim,
        "v_dim": change.v_dim,
        "pairs": None if pairs == full_pairs else pairs,
        "scale": float(site.module.scaling),
        "slot": slot,
    }


def _state_per_layer(config: PreTrainedConfig, layers: list[dict[str, Any]], shape: ModelShape) -> None:
    """Say the shapes once more in transformers' own ``per_layer_config``, which caches and servers read."""
    first = next(layer for layer in shape.layers if layer.heads)
    for name, value in (("head_dim", first.qk_dim), ("qk_head_dim", first.qk_dim), ("v_head_dim", first.v_dim)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = first.kv_heads
    config.per_layer_config = {
        index: {
            "num_attention_heads": layer["heads"],
            "num_key_value_heads": layer["kv_heads"],
            "head_dim": layer["qk_dim"],
            "qk_head_dim": layer["qk_dim"],
            "v_head_dim": layer["v_dim"],
        }
        if layer["heads"]
        else {"skip": ["attention"]}
        for index, layer in enumerate(layers)
    }


def _auto_map(base: str, stock_class: type) -> dict[str, str]:
    """Which class of the modelling file each auto class takes; servers want ``AutoModel`` as well."""
    prefix = f"{MODELING_FILE}.{modeling_headwise.PREFIX}"
    mapped = {"AutoConfig": prefix + modeling_headwise.CONFIG_MAPPING[base].__name__}
    for auto_class, names in modeling_headwise.AUTO_CLASSES.items():
        known = modeling_headwise.as_tuple(getattr(modeling_headwise.modeling_auto, names).get(base))
        if auto_class == "AutoModel" or stock_class.__name__ in known:
            name = stock_class.__name__ if stock_class.__name__ in known else known[0]
            mapped[auto_class] = prefix + name
    return mapped


def _stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of transformers that ``model`` is, or was before it was reduced."""
    classes = [c for c in type(model).__mro__ if not issubclass(c, modeling_headwise.ReducedModel)]
    return next(c for c in classes if issubclass(c, PreTrainedModel))


def _empty(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return cast(PreTrainedModel, nn.Module.to(model_class(config), dtype))


def _rebuild_rotary(student: PreTrainedModel) -> None:
    """Compute the frequencies of a stock student anew: they may be fewer than its teacher's."""
    rotary = getattr(student.base_model, "rotary_emb", None)
    if rotary is not None:
        student.base_model.rotary_emb = type(rotary)(config=student.config)


def _fill_attention(
    model: PreTrainedModel, student: PreTrainedModel, shape: ModelShape, plan: Plan, reduce: Reduce
) -> None:
    old = zip(sites_of(model), shape.layers, plan.layers, strict=True)
    kept = [(site, layer, change) for site, layer, change in old if not change.dropped]
    for (site, layer, change), new in zip(kept, sites_of(student), strict=True):
        if not change.heads or site.family.latent:
            continue
        weights = reduce(read_attention(site, layer.rotary), change, layer)
        write_attention(new, weights if new.reduced else _for_stock(weights, float(new.module.scaling)))


def _for_stock(weights: AttentionWeights, scale: float) -> AttentionWeights:
    """The same logits under the ``scale`` of a stock module: the ratio moves into the queries, or into their norm."""
    norms = (None if norm is None else norm.view(-1, norm.shape[-1])[0] for norm in (weights.norm_q, weights.norm_k))
    weights = replace(weights, norm_q=next(norms), norm_k=next(norms), rope_pairs_GP=None)
    ratio = weights.scale / scale
    if ratio == 1.0:
        return weights
    if weights.norm_q is not None:
        return replace(weights, norm_q=weights.norm_q * ratio, scale=scale)
    bias = None if weights.b_q_HK is None else weights.b_q_HK * ratio
    return replace(weights, w_q_HKD=weights.w_q_HKD * ratio, b_q_HK=bias, scale=scale)


def _fill_rest(model: PreTrainedModel, student: PreTrainedModel, plan: Plan) -> None:
    """Copy everything that is still empty (all but the attention) from the same place in ``model``."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    blocks = sites_of(model)[0].stack.blocks
    renumbered = {
        f"{blocks}.{new}.": f"{blocks}.{old}."
        for new, old in enumerate(old for old, change in enumerate(plan.layers) if not change.dropped)
    }
    copies: dict[int, Any] = {}
    for name, empty in [*student.named_parameters(remove_duplicate=False), *student.named_buffers()]:
        if not empty.is_meta:
            continue
        parent, _, leaf = name.rpartition(".")
        source = tensors[_old_name(name, renumbered)]
        if id(source) not in copies:  # tied weights stay tied
            fresh = source.detach().clone()
            copies[id(source)] = nn.Parameter(fresh) if isinstance(empty, nn.Parameter) else fresh
        setattr(cast(nn.Module, student.get_submodule(parent)), leaf, copies[id(source)])


def _old_name(name: str, renumbered: dict[str, str]) -> str:
    for new, old in renumbered.items():
        if new in name:
            return name.replace(new, old)
    return name
