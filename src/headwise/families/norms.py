"""The norms that feed the attention and the MLP of a block, in one neutral view, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site, has_one_stack
from headwise.families.weights import attention_projections, put
from headwise.files.errors import InputError


@dataclass(frozen=True, slots=True)
class NormWeights:
    """What a norm does to a normalised vector ``z``: ``gain * z + bias``."""

    gain_D: Tensor
    bias_D: Tensor | None = None


def feeding_norms(model: PreTrainedModel, site: Site) -> tuple[nn.Module, nn.Module]:
    """The norms in front of the attention and in front of the MLP of a block, which both add to the residual stream.

    An `InputError` where other norms stand there, or none that headwise knows.
    """
    name, mlp = type(model).__name__, mlp_of(site)
    behind = site.stack.norm_behind or (site.stack.mlp is not None and site.stack.mlp.norm_behind)
    if behind or (mlp is not None and mlp.norm_after):
        raise InputError(f"{name} has norms behind its attention or MLP, whose outputs can then not be added up.")
    common = site.stack.common_norm
    shared = () if common is None else (f"{site.block_path}.{common}",)
    paths = site.norm_paths or shared, site.mlp_norm_paths or shared
    if any(len(each) != 1 for each in paths):
        raise InputError(f"headwise does not know which norms feed the attention and the MLP of {name}.")
    (attention,), (before_mlp,) = paths
    return model.base_model.get_submodule(attention), model.base_model.get_submodule(before_mlp)


def check_joins(model: PreTrainedModel, sites: Sequence[Site]) -> None:
    """Raise where the blocks of ``sites`` cannot become one that adds up what they would."""
    if not has_one_stack(model):
        raise InputError("The blocks of an encoder-decoder cannot be joined.")
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None and len({kinds[int(site.block_path.rsplit(".", 1)[1])] for site in sites}) > 1:
        raise InputError("Blocks whose attention is of different kinds cannot be joined.")
    for site in sites:
        if site.family.latent:
            raise InputError("Blocks with latent attention (MLA) cannot be joined.")
        mlp = mlp_of(site)
        projections = [] if site.removed else attention_projections(site), [] if mlp is None else mlp.projections[:-1]
        for norm, fed in zip(feeding_norms(model, site), projections, strict=True):
            bias = getattr(norm, "bias", None)
            if isinstance(bias, Tensor) and bias.any() and any(linear.bias is None for linear in fed):
                raise InputError(
                    f"The norms of {type(model).__name__} have biases, and the projections behind them none that could "
                    "take them up: its blocks cannot be joined."
                )


def read_norm(norm: nn.Module) -> NormWeights:
    """What ``norm`` multiplies with and adds."""
    bias = getattr(norm, "bias", None)
    return NormWeights(cast(Tensor, norm.weight) + _offset(norm), bias if isinstance(bias, Tensor) else None)


def write_unit_norm(norm: nn.Module, like: nn.Module) -> None:
    """Let ``norm``, of the same class as ``like``, only normalise."""
    if not has_weight(norm):  # it left with what it fed
        return
    put(norm, "weight", torch.full_like(cast(Tensor, like.weight), 1.0 - _offset(like)))
    bias = getattr(like, "bias", None)
    if isinstance(bias, Tensor):
        put(norm, "bias", torch.zeros_like(bias))


def has_weight(norm: nn.Module) -> bool:
    """Whether ``norm`` is there: what stands in the place of one that was removed has no weight."""
    return isinstance(getattr(norm, "weight", None), Tensor)


def _offset(norm: nn.Module) -> float:
    """What is added to the weight of a norm before it multiplies: 1 in Gemma, else 0."""
    if isinstance(norm, nn.LayerNorm):
        return 0.0
    weight = cast(Tensor, norm.weight)
    with torch.no_grad():
        even = torch.full_like(weight, 64.0)  # has root mean square 64: large beside any epsilon
        return float((norm(even).float() - weight.float()).median().round())
