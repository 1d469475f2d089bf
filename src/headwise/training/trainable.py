"""Which parameters of a reduced model are trained: reduced attention and MLPs, singular values, LoRA, or all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from headwise.families.mlp import MlpSite, mlp_of
from headwise.families.shapes import shape_of
from headwise.families.sites import Site, is_transposed, sites_of
from headwise.families.weights import attention_projections, balanced, read_attention, write_attention
from headwise.files.errors import InputError
from headwise.records.healing import Train
from headwise.runtime.absorbed_attention import NoPairs

LORA_RANK = 16


def make_trainable(
    model: PreTrainedModel,
    train: Train,
    layers: Collection[int],
    *,
    mlps: Collection[int] = (),
    coded: Collection[int] = (),
) -> Callable[[], PreTrainedModel]:
    """Let only ``train`` of the attention ``layers`` (or all weights) require gradients, and balance these layers.

    So do the ``mlps`` of these layers. Layers whose slots in the cache are ``coded`` are not balanced: that changes the
    scale of values, and levels would not fit. Returns a function that merges factors and adapters into the weights and
    gives the ordinary model back.
    """
    chosen = [(site, layer) for site, layer in zip(sites_of(model), shape_of(model).layers, strict=True)]
    chosen = [pair for i, pair in enumerate(chosen) if i in layers and not pair[0].removed]
    with torch.no_grad():
        for site, layer in chosen:
            if getattr(site.module, "layer_idx", None) not in coded:
                write_attention(site, balanced(read_attention(site, layer.rotary)))
    sites = [site for site, _ in chosen]
    cut = [mlp for i, site in enumerate(sites_of(model)) if i in mlps and (mlp := mlp_of(site)) is not None]
    learning = [module for part in (*map(projections, sites), *(mlp.projections for mlp in cut)) for module in part]
    model.requires_grad_(train == "all")
    if train == "attention":
        for module in learning:
            module.requires_grad_(True)
        for site in sites:  # what reads latents is no projection
            for parameter in site.module.parameters(recurse=False):
                parameter.requires_grad_(True)
    elif train == "values":
        return _scale(model, sites, cut)
    elif train == "lora":
        return _adapt(model, learning)
    return lambda: model


def projections(site: Site) -> list[nn.Module]:
    """The linear maps of one attention: queries, keys and values (or one for all), and the output."""
    return [*(module for module in attention_projections(site) if not isinstance(module, NoPairs)), site.out]


class _Scaled(nn.Module):
    """A weight whose head coordinates can grow and shrink: the singular values of the product it is a factor of."""

    def __init__(self, size: int, rows: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.scale[:, None] if self.rows else self.scale)


def _scale(model: PreTrainedModel, sites: list[Site], mlps: list[MlpSite]) -> Callable[[], PreTrainedModel]:
    """One factor for each coordinate of queries and of values, where these leave their head, and for each channel."""
    scaled: list[nn.Module] = []
    ends = [(projections(site)[0], True) for site in sites] + [(site.out, False) for site in sites]
    for module, head_side in (*ends, *((mlp.down, False) for mlp in mlps)):
        rows = head_side != is_transposed(module)
        size = cast(Tensor, module.weight).shape[0 if rows else 1]
        parametrize.register_parametrization(module, "weight", _Scaled(size, rows))
        scaled.append(module)

    def merge() -> PreTrainedModel:
        for module in scaled:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        return model

    return merge


def _adapt(model: PreTrainedModel, learning: list[nn.Module]) -> Callable[[], PreTrainedModel]:
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - slow to import, and only LoRA needs it
    except ImportError:
        raise InputError('LoRA needs PEFT: pip install "headwise[train]".') from None
    names = {module: name for name, module in model.named_modules()}
    targets = [names[module] for module in learning]
    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=targets)
    adapted = get_peft_model(model, config)
    return lambda: cast(PreTrainedModel, adapted.merge_and_unload())
