"""Importance of MLP channels, out of the same backward pass as that of heads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site

See = Callable[[int, Tensor], None]


@contextmanager
def watching_channels(sites: Sequence[Site], see: See) -> Generator[None, None, None]:
    """Call ``see`` with the number of a layer and, for each of its MLP's channels, the sum over tokens of the squared
    gradient of a mask on that channel at that token alone.

    A channel acts on the loss through many tokens; gradients of labels sampled apart hardly add up over tokens, and
    single tokens are far more samples than blocks of them.
    """
    with ExitStack() as stack:
        for number, site in enumerate(sites):
            mlp = mlp_of(site)
            if mlp is not None:
                stack.callback(_watch(mlp.down, number, see).remove)
        yield


def _watch(down: nn.Module, number: int, see: See) -> RemovableHandle:
    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not torch.is_grad_enabled() or not args[0].requires_grad:
            return
        x = args[0].detach()  # a hook must not hold the tensor it hangs on
        args[0].register_hook(
            lambda gradient: see(number, (x.float() * gradient.float()).square().flatten(0, -2).sum(0))
        )

    return down.register_forward_pre_hook(enter)
