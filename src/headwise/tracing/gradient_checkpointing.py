"""Backward passes through frozen models, with or without gradient checkpointing of each block."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headwise.families.sites import sites_of


@contextmanager
def gradient_checkpointing(model: PreTrainedModel) -> Generator[None, None, None]:
    """Keep only the inputs of each block for the backward pass, in evaluation mode and for any family.

    A block runs without gradients first and is recomputed with gradients, so code that watches can tell the two apart
    by ``torch.is_grad_enabled()``. Weights need not require gradients.
    """
    blocks = list({id(site.block): site.block for site in sites_of(model)}.values())
    for block in blocks:
        block.forward = _recomputed(block.forward)  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def block_inputs_require_grad(model: PreTrainedModel) -> Generator[None, None, None]:
    """Let gradients flow through the blocks of a frozen model, keeping all activations: faster, more memory."""

    def start(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not torch.is_grad_enabled() or hidden.requires_grad:
            return args, kwargs
        hidden = hidden.detach().requires_grad_()
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    blocks = {id(site.block): site.block for site in sites_of(model)}.values()
    handles = [block.register_forward_pre_hook(start, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in places]
        if not tensors[0].requires_grad:
            tensors[0] = tensors[0].detach().requires_grad_()  # a stack's first block: the embeddings are frozen

        def rerun(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            args, kwargs = pytree.tree_unflatten(filled, tree)
            return forward(*args, **kwargs)

        return checkpoint(rerun, *tensors, use_reentrant=True, preserve_rng_state=False)

    return run


@contextmanager
def frozen(model: nn.Module) -> Generator[None, None, None]:
    """Let no parameter require a gradient: only activations do, at half the cost."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
