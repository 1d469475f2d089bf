"""A model and a plan in, the reduced model out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.mlp import MlpSite, MlpWeights, mlp_of, read_mlp, write_mlp
from headwise.families.norms import feeding_norms, has_weight, read_norm, write_unit_norm
from headwise.families.reduced import per_layer_class_of, stock_class_of
from headwise.families.shapes import CACHE_ENTRY, packed_entries, shape_of
from headwise.families.sites import Site, sites_of
from headwise.families.weights import AttentionWeights, read_attention, rescaled, write_attention
from headwise.files.errors import InputError
from headwise.records.plan import Changes, Plan, changed
from headwise.records.shape import LayerShape, ModelShape
from headwise.reduction.apply import Method, Statistics, apply_changes, apply_to_mlp, statistics_of
from headwise.reduction.config import per_layer_config
from headwise.reduction.kinds import kind_of, kinds
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
        raise InputError(
            f"This plan cannot be a stock {shape.family} model: {stock}; use the per-layer format, or make a plan with "
            "--uniform."
        )
    if isinstance(stock, str) and any(layer.latent for layer in shape.layers):
        raise InputError("Latent attention (MLA) has no per-layer shapes: its models keep their stock class.")
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
    sites = sites_of(model)
    members = [
        _Member(*each, statistics_of(tensors, method, index))
        for index, each in enumerate(zip(sites, shape.layers, plan.layers, strict=True))
    ]
    for run, new in zip(plan.made_of(), sites_of(reduced), strict=True):
        if len(run) > 1:
            _fill_joined(model, reduced, [members[number] for number in run], new)
            continue
        member = members[run[0]]
        if (mlp := mlp_of(new)) is not None and any(change.acts_on == "mlp" for change in member.changes):
            _write_mlp(mlp, member.mlp())
        _write_attention(new, member.attention())


@dataclass(frozen=True, slots=True)
class _Member:
    """A block of the original model and what a plan does to it."""

    site: Site
    layer: LayerShape
    changes: Changes
    statistics: Statistics | None

    def attention(self) -> AttentionWeights | None:
        """The weights of its attention after its changes; None where nothing is left."""
        after = changed(self.layer, self.changes)
        if not self.layer.heads or after is None:
            return None
        weights = read_attention(self.site, self.layer.rotary)
        if after.heads:
            _check_finite(weights, self.site.path)
        return apply_changes(weights, self.layer, self.changes, self.statistics)[0]

    def mlp(self) -> MlpWeights | None:
        """The weights of its MLP after its changes; None where nothing is left."""
        mlp = mlp_of(self.site)
        return None if mlp is None else apply_to_mlp(read_mlp(mlp), self.layer, self.changes, self.statistics)


def _fill_joined(model: PreTrainedModel, reduced: PreTrainedModel, members: Sequence[_Member], new: Site) -> None:
    """Fill the block ``new``, which becomes all of ``members`` at once; the norms in front of it only normalise."""
    join = kind_of(next(change for change in members[0].changes if change.following())).part("apply")
    norms = [feeding_norms(model, member.site) for member in members]
    attentions = [(member.attention(), norm) for member, (norm, _) in zip(members, norms, strict=True)]
    mlps = [(member.mlp(), norm) for member, (_, norm) in zip(members, norms, strict=True)]
    _write_attention(new, join.join_attention([(own, read_norm(norm)) for own, norm in attentions if own is not None]))
    if (mlp := mlp_of(new)) is not None:
        _write_mlp(mlp, join.join_mlp([(own, read_norm(norm)) for own, norm in mlps if own is not None]))
    for norm, likes in zip(feeding_norms(reduced, new), zip(*norms, strict=True), strict=True):
        write_unit_norm(norm, next((like for like in likes if has_weight(like)), likes[0]))


def _write_mlp(mlp: MlpSite, weights: MlpWeights | None) -> None:
    if weights is not None:
        write_mlp(mlp, weights)


def _write_attention(new: Site, weights: AttentionWeights | None) -> None:
    if weights is not None:
        write_attention(new, weights if new.reduced else _for_stock(weights, float(new.module.scaling)))


def _check_finite(weights: AttentionWeights, path: str) -> None:
    matrices = (weights.w_q_HKD, weights.w_k_GKD, weights.w_v_GVD, weights.w_o_HVD)
    if not all(torch.isfinite(matrix).all() for matrix in matrices):
        raise InputError(f"The attention weights of {path} are not all finite numbers.")


def _for_stock(weights: AttentionWeights, scale: float) -> AttentionWeights:
    """The same logits under the ``scale`` of a stock module: the ratio moves into the queries, or into their norm."""
    norms = (None if norm is None else norm.view(-1, norm.shape[-1])[0] for norm in (weights.norm_q, weights.norm_k))
    return rescaled(replace(weights, norm_q=next(norms), norm_k=next(norms), rope_pairs_GP=None), scale)


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
