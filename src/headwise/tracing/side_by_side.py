"""Neighbouring blocks run side by side: all attentions read one stream, all MLPs the stream behind these."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site


class _Stop(Exception):
    """Raised from a hook to leave a block early."""


def side_by_side(sites: Sequence[Site], hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What the blocks of ``sites``, each with attention and MLP, make of ``hidden`` when they are added up.

    ``args`` and ``kwargs`` are what any of them is given beside.
    """
    attended = torch.stack([_output_of(site.out, site, hidden, args, kwargs) for site in sites]).sum(0)
    first, *others = sites
    downs = [mlp.down for site in sites if (mlp := mlp_of(site)) is not None]
    added: Tensor | float = 0.0
    for site, down in zip(others, downs[1:], strict=True):
        with _giving(site.out, lambda _: attended):
            added = added + _output_of(down, site, hidden, args, kwargs)
    with _giving(first.out, lambda _: attended), _giving(downs[0], lambda own: own + added):
        return first.block(hidden, *args, **kwargs)


def _output_of(module: nn.Module, site: Site, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What ``module`` inside a block gives when the block gets ``hidden``."""
    seen: list[Tensor] = []

    def see(output: Tensor) -> Tensor:
        seen.append(output)
        raise _Stop

    with _giving(module, see):
        try:
            site.block(hidden, *args, **kwargs)
        except _Stop:
            return seen[0]
    raise ValueError(f"{site.block_path} did not run what it is made of.")


@contextmanager
def _giving(module: nn.Module, exchange: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """``module`` gives what ``exchange`` makes of its output."""
    handle = module.register_forward_hook(lambda module, args, output: exchange(output))
    try:
        yield
    finally:
        handle.remove()
