"""Where the attention of a loaded model sits: one `Site` per attention layer, stock or reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.families.family import Family, Stack
from headwise.families.known import family_of
from headwise.files.errors import InputError
from headwise.records.shape import Cache
from headwise.runtime.modeling_headwise import HeadwiseConfig, NoAttention, ReducedAttention

HEAD_WIDTH = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True, slots=True)
class Site:
    """One attention layer of a live model. Paths start at ``model.base_model``."""

    family: Family
    stack: Stack
    block_path: str
    block: nn.Module
    module: Any  # the attention module: nn.Module.__getattr__ defeats type checkers, see its users in weights.py
    out: nn.Module
    cache: Cache
    norm_paths: tuple[str, ...]
    mlp_norm_paths: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Path of the attention module."""
        return f"{self.block_path}.{self.stack.attention}"

    @property
    def removed(self) -> bool:
        """Whether this layer has lost its attention."""
        return isinstance(self.module, NoAttention)

    @property
    def reduced(self) -> bool:
        """Whether this is a reduced attention of headwise (then q, k and v are never fused)."""
        return isinstance(self.module, ReducedAttention)

    @property
    def head_width(self) -> int:
        """Query/key width of one head."""
        return next(getattr(self.module, name) for name in HEAD_WIDTH if hasattr(self.module, name))


def base_type(config: PreTrainedConfig) -> str:
    """The stock ``model_type`` of a config, also of a reduced model."""
    return config.headwise["base"] if config.model_type == HeadwiseConfig.model_type else config.model_type


def sites_of(model: PreTrainedModel) -> list[Site]:
    """All attention layers of ``model``, stack by stack, in the order in which plans list them.

    >>> hw.sites_of(model)[0].path
    'layers.0.self_attn'
    """
    family = family_of(base_type(model.config))
    return [site for stack in family.stacks for site in _stack_sites(model, family, stack)]


def has_one_stack(model: PreTrainedModel) -> bool:
    """Whether blocks follow one another in one list; those of an encoder-decoder do not."""
    return len(family_of(base_type(model.config)).stacks) == 1


def _stack_sites(model: PreTrainedModel, family: Family, stack: Stack) -> list[Site]:
    try:
        blocks = cast(nn.ModuleList, model.base_model.get_submodule(stack.blocks))
    except AttributeError:
        place = f"{stack.blocks!r}, where headwise looks for the attention of {family.name} models"
        raise InputError(f"{type(model).__name__} has no {place}.") from None
    norms, mlp_norms = (
        () if part is None or (part.norms_if is not None and not getattr(model.config, part.norms_if)) else part.norms
        for part in (stack, stack.mlp)
    )
    decoder = stack.cache == "none" and len(family.stacks) == 1 and getattr(model.config, "is_decoder", False)
    sites = []
    for index, block in enumerate(blocks):
        path = f"{stack.blocks}.{index}"
        sites.append(
            Site(
                family=family,
                stack=stack,
                block_path=path,
                block=block,
                module=block.get_submodule(stack.attention),
                out=_optional(block, stack.out),
                cache="tokens" if decoder else stack.cache,
                norm_paths=tuple(f"{path}.{name}" for name in norms),
                mlp_norm_paths=tuple(f"{path}.{name}" for name in mlp_norms),
            )
        )
    return sites


def _optional(block: nn.Module, path: str) -> nn.Module:
    """The submodule at ``path``, or an identity where it left together with its attention."""
    try:
        return block.get_submodule(path)
    except AttributeError:
        return nn.Identity()


def matrix(module: nn.Module) -> Tensor:
    """The weight of a projection as (out, in), whichever way the module stores it."""
    weight = cast(Tensor, module.weight)
    return weight.T if is_transposed(module) else weight


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D stores (in, out)."""
    return hasattr(module, "nf")
