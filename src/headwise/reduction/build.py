"""A model and a plan in, the reduced model out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.mlp import mlp_of, read_mlp, write_mlp
from headwise.families.reduced import per_layer_class_of, stock_class_of
from headwise.families.shapes import CACHE_ENTRY, packed_entries, shape_of
from headwise.families.sites import Site, sites_of
from headwise.families.weights import AttentionWeights, read_attention, write_attention
from headwise.files.errors import InputError
from headwise.records.plan import Changes, Plan
from headwise.records.shape import LayerShape, ModelShape
from headwise.reduction.apply import Method, Statistics, apply_changes, apply_to_mlp, statistics_of
from headwise.reduction.config import per_layer_config
from headwise.reduction.kinds import kinds
from headwise.reduction.stock import stock_config

Format = Literal["auto", "stock", "per-layer"]


def build_reduced(
    model: PreTrainedModel,
    plan: Plan,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    method: Method = "weighted",
    form: Format = "auto",
    share: bool = False,
) -> PreTrainedModel:
    """A copy of ``model`` with the changes that ``plan`` asks for; ``model`` itself is left as it is.

    With ``share`` the two hold the same tensors outside the attention, and memory stays near one copy.

    ``tensors`` are those of a profile, from which ``method`` says what stays of each layer; without them its weights
    alone decide. ``form`` "auto" gives a stock class of transformers where one can express the plan, "per-layer"
    headwise's own, "stock" raises where that is impossible. What the plan leaves open is chosen by `settle_plan`.
    """
    plan = settle_plan(model, plan, form, tensors=tensors, method=method)
    shape = shape_of(model)
    after = plan.after(shape)
    stock = "per-layer shapes were asked for" if form == "per-layer" else stock_config(model, shape, plan)
    if form == "stock" and isinstance(stock, str):
        raise InputError(f"This plan cannot be a stock {shape.family} model: {stock}; use the per-layer format.")
    if isinstance(stock, str):
        config, kind = per_layer_config(model, shape, after, plan.layers), per_layer_class_of(model)
    else:
        config, kind = stock, stock_class_of(model)
    config.__dict__.pop(CACHE_ENTRY, None)
    if (packed := packed_entries(layer for layer in after if layer is not None)) is not None:
        setattr(config, CACHE_ENTRY, packed)
        if isinstance(stock, str):
            config.headwise["cache"] = True  # there will be codes beside the weights, also on the Hub
    reduced = _empty(kind, config, model.dtype)
    _rebuild_rotary(reduced, model.device)
    _fill_changed(model, reduced, shape, plan, tensors, method)
    _fill_rest(model, reduced, after, share)
    if model.can_generate():
        reduced.generation_config = copy.deepcopy(model.generation_config)
    return reduced.train(model.training)


def settle_plan(
    model: PreTrainedModel,
    plan: Plan,
    form: Format = "auto",
    *,
    tensors: Mapping[str, Tensor] | None = None,
    method: Method = "weighted",
) -> Plan:
    """``plan`` checked against ``model``, with everything named that it leaves open, such as which RoPE pairs stay.

    In a stock model one choice must do for all layers.
    """
    plan.check(shape_of(model))
    statistics = {index: statistics_of(tensors, method, index) for index in range(len(plan.layers))}
    for kind in kinds():
        if kind.has("settle"):
            plan = kind.part("settle").settle(model, plan, statistics, shared=form == "stock")
    return plan


def _empty(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return cast(PreTrainedModel, nn.Module.to(model_class(config), dtype))


def _rebuild_rotary(reduced: PreTrainedModel, device: torch.device) -> None:
    """Compute the frequencies anew: a stock class may have fewer, and long inputs may have changed the original's."""
    rotary = getattr(reduced.base_model, "rotary_emb", None)
    if rotary is not None:
        reduced.base_model.rotary_emb = type(rotary)(config=rotary.config).to(device)


def _fill_changed(
    model: PreTrainedModel,
    reduced: PreTrainedModel,
    shape: ModelShape,
    plan: Plan,
    tensors: Mapping[str, Tensor] | None,
    method: Method,
) -> None:
    staying = iter(sites_of(reduced))
    layers = zip(sites_of(model), shape.layers, plan.layers, plan.after(shape), strict=True)
    for index, (site, layer, changes, after) in enumerate(layers):
        if after is None:
            continue
        new, statistics = next(staying), statistics_of(tensors, method, index)
        _fill_mlp(site, new, layer, changes, statistics)
        if not layer.heads or site.family.latent:
            continue
        weights = read_attention(site, layer.rotary)
        if after.heads:
            _check_finite(weights, site.path)
        kept, _ = apply_changes(weights, layer, changes, statistics)
        if kept is not None:
            write_attention(new, kept if new.reduced else _for_stock(kept, float(new.module.scaling)))


def _fill_mlp(site: Site, new: Site, layer: LayerShape, changes: Changes, statistics: Statistics | None) -> None:
    before, after = mlp_of(site), mlp_of(new)
    if before is None or after is None or all(change.acts_on != "mlp" for change in changes):
        return
    kept = apply_to_mlp(read_mlp(before), layer, changes, statistics)
    if kept is not None:
        write_mlp(after, kept)


def _check_finite(weights: AttentionWeights, path: str) -> None:
    matrices = (weights.w_q_HKD, weights.w_k_GKD, weights.w_v_GVD, weights.w_o_HVD)
    if not all(torch.isfinite(matrix).all() for matrix in matrices):
        raise InputError(f"The attention weights of {path} are not all finite numbers.")


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


def _fill_rest(
    model: PreTrainedModel, reduced: PreTrainedModel, after: Sequence[LayerShape | None], share: bool
) -> None:
    """Copy everything that is still empty (all that no change touched) from the same place in ``model``."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    blocks = sites_of(model)[0].stack.blocks
    renumbered = {
        f"{blocks}.{new}.": f"{blocks}.{old}."
        for new, old in enumerate(old for old, layer in enumerate(after) if layer is not None)
    }
    copies: dict[int, Any] = {}
    for name, empty in [*reduced.named_parameters(remove_duplicate=False), *reduced.named_buffers()]:
        if not empty.is_meta:
            continue
        parent, _, leaf = name.rpartition(".")
        source = tensors[_old_name(name, renumbered)]
        if id(source) not in copies:  # tied weights stay tied
            fresh = source.detach() if share else source.detach().clone()
            trainable = empty.requires_grad  # as the class makes it, whatever was frozen in the original
            copies[id(source)] = nn.Parameter(fresh, trainable) if isinstance(empty, nn.Parameter) else fresh
        setattr(cast(nn.Module, reduced.get_submodule(parent)), leaf, copies[id(source)])


def _old_name(name: str, renumbered: dict[str, str]) -> str:
    for new, old in renumbered.items():
        if new in name:
            return name.replace(new, old)
    return name
