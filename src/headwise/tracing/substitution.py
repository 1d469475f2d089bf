"""What a model loses with parts of one block left out, or a block side by side with the next one: by running the rest.

Hidden states in front of every block are kept from one pass; each substitution starts from them. All that come out of
the same block run on together.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.families.mlp import mlp_of
from headwise.families.norms import check_joins
from headwise.families.sites import Site, sites_of
from headwise.files.errors import InputError
from headwise.tracing.fisher import kl_from_baseline
from headwise.tracing.forward import forward
from headwise.tracing.side_by_side import side_by_side

TOKENS = 256
PARTS = ("mlp", "block", "flattened")


class Call(NamedTuple):
    """What a block was given."""

    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]


def substituted(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]]) -> list[dict[str, float]]:
    """For each block the KL divergence in nats per output without its "mlp", without the whole "block", and with the
    next block side by side with it, "flattened": as far as it can be said.

    ``model`` has one list of blocks. Where headwise knows no MLP, none is left out, and nothing lost.
    """
    sites = sites_of(model)
    blocks = [site.block for site in sites]
    totals: list[dict[str, float]] = [dict.fromkeys(PARTS[:2], 0.0) for _ in sites]
    pairs = [number for number in range(len(sites) - 1) if _joins(model, sites[number : number + 2])]
    for number in pairs:
        totals[number]["flattened"] = 0.0
    outputs = 0
    with torch.inference_mode():
        for batch in some_tokens(batches):
            with recorded(blocks) as calls:
                baseline = forward(model, batch)
            for i, site in enumerate(sites):
                states = {(i, "mlp"): _without_mlp(site, calls[i]), (i, "block"): calls[i].hidden}
                if i - 1 in pairs:
                    states[i - 1, "flattened"] = side_by_side(sites[i - 1 : i + 1], *calls[i - 1])
                repeated = {name: torch.cat([tensor] * len(states)) for name, tensor in batch.items()}
                with starting(blocks[: i + 1], torch.cat(list(states.values()))):
                    name, output = next(iter(forward(model, repeated).items()))
                for (number, part), own in zip(states, output.chunk(len(states)), strict=True):
                    totals[number][part] += kl_from_baseline(baseline, {name: own}).double().sum().item()
            outputs += kl_from_baseline(baseline, baseline).numel()
    return [{part: max(0.0, nats / outputs) for part, nats in each.items()} for each in totals]


def _joins(model: PreTrainedModel, sites: Sequence[Site]) -> bool:
    """Whether the blocks of ``sites`` can run side by side."""
    try:
        check_joins(model, sites)
    except InputError:
        return False
    return all(not site.removed and mlp_of(site) is not None for site in sites)


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


def _without_mlp(site: Site, call: Call) -> Tensor:
    """What a block makes of what it was given when the end of its MLP gives zeros."""
    mlp = mlp_of(site)
    hushed = None if mlp is None else mlp.down.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
    try:
        return site.block(call.hidden, *call.args, **call.kwargs)
    finally:
        if hushed is not None:
            hushed.remove()


@contextmanager
def recorded(blocks: Sequence[nn.Module]) -> Generator[list[Call], None, None]:
    """What each block is given, once it has been."""
    calls: list[Call] = []

    def see(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append(Call(args[0], args[1:], others) if args else Call(kwargs["hidden_states"], (), others))

    handles = [block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks]
    try:
        yield calls
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
