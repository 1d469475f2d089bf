"""What a model loses with the MLP or the whole of one block left out, measured by running the rest.

Hidden states in front of every block are kept from one pass; each substitution starts from them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site, sites_of
from headwise.tracing.fisher import kl_from_baseline
from headwise.tracing.forward import forward

TOKENS = 256


def left_out(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> list[list[float]]:
    """For each block the KL divergence in nats per output without its MLP, and without all of it.

    ``model`` has one list of blocks. Where headwise knows no MLP, none is left out, and nothing lost.
    """
    sites = sites_of(model)
    blocks = [site.block for site in sites]
    totals, outputs = torch.zeros(len(sites), 2, dtype=torch.float64), 0
    with torch.inference_mode():
        for batch in some_tokens(batches):
            with recorded(blocks) as entered:
                baseline = forward(model, batch)
            for i, site in enumerate(sites):
                for part, modules in enumerate(_parts(site)):
                    with starting(blocks[:i], entered[i]), _silent(modules, site.block):
                        nats = kl_from_baseline(baseline, forward(model, batch))
                    totals[i, part] += nats.double().sum().item()
            outputs += kl_from_baseline(baseline, baseline).numel()
    return (totals / outputs).clamp(min=0).tolist()


def some_tokens(batches: Sequence[dict[str, Tensor]], tokens: int = TOKENS) -> list[dict[str, Tensor]]:
    """The first ``tokens`` of texts; of other inputs the first batch."""
    chosen: list[dict[str, Tensor]] = []
    left = tokens
    for batch in batches:
        if "input_ids" not in batch:
            return [batch]
        rows, length = batch["input_ids"].shape
        length = min(length, left)
        rows = max(1, min(rows, left // length))
        chosen.append({name: tensor[:rows, :length] for name, tensor in batch.items()})
        left -= rows * length
        if left <= 0:
            break
    return chosen


def _parts(site: Site) -> list[list[nn.Module]]:
    """Modules to silence: the end of the MLP, and the block itself."""
    mlp = mlp_of(site)
    return [[] if mlp is None else [mlp.down], [site.block]]


@contextmanager
def recorded(blocks: Sequence[nn.Module]) -> Generator[list[Tensor], None, None]:
    """The hidden states that enter each block, once they have."""
    entered: list[Tensor] = []

    def see(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        entered.append(_hidden(args, kwargs))

    handles = [block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def starting(before: Sequence[nn.Module], hidden: Tensor) -> Generator[None, None, None]:
    """The blocks ``before`` compute nothing and give ``hidden``."""
    own = [block.__dict__.get("forward") for block in before]

    def skip(*args: Any, **kwargs: Any) -> Tensor:
        return hidden

    for block in before:
        block.forward = skip
    try:
        yield
    finally:
        for block, forward_before in zip(before, own, strict=True):
            del block.forward
            if forward_before is not None:
                block.forward = forward_before


@contextmanager
def _silent(modules: Sequence[nn.Module], block: nn.Module) -> Generator[None, None, None]:
    """Projections among ``modules`` give zeros, and ``block`` what it is given."""

    def hush(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return _hidden(args, kwargs) if module is block else torch.zeros_like(output)

    handles = [module.register_forward_hook(hush, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
