"""A model and a plan in, the reduced model (the student) out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.reduced import per_layer_class_of, stock_class_of
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.families.weights import AttentionWeights, read_attention, write_attention
from headwise.files.errors import InputError
from headwise.records.plan import Plan
from headwise.records.shape import ModelShape
from headwise.reduction.config import student_config
from headwise.reduction.stock import stock_config
from headwise.reduction.widths.apply import Kept, cut_attention
from headwise.reduction.widths.pairs import name_pairs

Format = Literal["auto", "stock", "per-layer"]


def build_student(
    model: PreTrainedModel,
    plan: Plan,
    *,
    kept: Mapping[int, Kept] | None = None,
    form: Format = "auto",
    share: bool = False,
) -> PreTrainedModel:
    """A copy of ``model`` with the attention that ``plan`` asks for; ``model`` itself is left as it is.

    With ``share`` the two hold the same tensors outside the attention, and memory stays near one copy.

    ``kept`` holds, by number of the layer, the directions along which to cut (`reduction.widths.directions`); layers
    without any are cut by their weights alone. ``form`` "auto" gives a stock class of transformers where one can
    express the plan, "per-layer" headwise's own, "stock" raises where that is impossible.
    RoPE pairs that the plan does not name are chosen by `settle_plan`.
    """
    plan = settle_plan(model, plan, form)
    shape = shape_of(model)
    stock = "per-layer shapes were asked for" if form == "per-layer" else stock_config(model, shape, plan)
    if form == "stock" and isinstance(stock, str):
        raise InputError(f"This plan cannot be a stock {shape.family} model: {stock}; use the per-layer format.")
    if isinstance(stock, str):
        config = student_config(model, shape, plan)
        student = _empty(per_layer_class_of(model), config, model.dtype)
    else:
        student = _empty(stock_class_of(model), stock, model.dtype)
    _rebuild_rotary(student, model.device)
    _fill_attention(model, student, shape, plan, kept or {})
    _fill_rest(model, student, plan, share)
    if model.can_generate():
        student.generation_config = copy.deepcopy(model.generation_config)
    return student.train(model.training)


def settle_plan(model: PreTrainedModel, plan: Plan, form: Format = "auto") -> Plan:
    """``plan`` checked against ``model``, with every RoPE pair it keeps named: one set for all in a stock model."""
    shape = shape_of(model)
    plan.check(shape)
    return name_pairs(model, shape, plan, shared=form == "stock")


def _empty(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return cast(PreTrainedModel, nn.Module.to(model_class(config), dtype))


def _rebuild_rotary(student: PreTrainedModel, device: torch.device) -> None:
    """Compute the frequencies anew: a stock student may have fewer, and long inputs may have changed its teacher's."""
    rotary = getattr(student.base_model, "rotary_emb", None)
    if rotary is not None:
        student.base_model.rotary_emb = type(rotary)(config=rotary.config).to(device)


def _fill_attention(
    model: PreTrainedModel, student: PreTrainedModel, shape: ModelShape, plan: Plan, kept: Mapping[int, Kept]
) -> None:
    old = enumerate(zip(sites_of(model), shape.layers, plan.layers, strict=True))
    staying = [(index, *layer) for index, layer in old if not layer[2].dropped]
    for (index, site, layer, change), new in zip(staying, sites_of(student), strict=True):
        if not change.heads or site.family.latent:
            continue
        weights = read_attention(site, layer.rotary)
        matrices = (weights.w_q_HKD, weights.w_k_GKD, weights.w_v_GVD, weights.w_o_HVD)
        if not all(torch.isfinite(matrix).all() for matrix in matrices):
            raise InputError(f"The attention weights of {site.path} are not all finite numbers.")
        weights = cut_attention(weights, change, layer, kept.get(index))
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


def _fill_rest(model: PreTrainedModel, student: PreTrainedModel, plan: Plan, share: bool) -> None:
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
            fresh = source.detach() if share else source.detach().clone()
            trainable = empty.requires_grad  # as the class makes it, whatever was frozen in the teacher
            copies[id(source)] = nn.Parameter(fresh, trainable) if isinstance(empty, nn.Parameter) else fresh
        setattr(cast(nn.Module, student.get_submodule(parent)), leaf, copies[id(source)])


def _old_name(name: str, renumbered: dict[str, str]) -> str:
    for new, old in renumbered.items():
        if new in name:
            return name.replace(new, old)
    return name
