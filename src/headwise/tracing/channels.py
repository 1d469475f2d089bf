"""Importance of MLP channels, out of the same backward pass as that of heads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site
from headwise.linalg.sums import Sums

CLIPPED = 0.9  # of the tokens have gradients that are taken as they are; the others are cut to as much
See = Callable[[int, dict[str, Tensor]], None]


@contextmanager
def watching_channels(sites: Sequence[Site], see: See) -> Generator[None, None, None]:
    """Call ``see`` with the number of a layer and sums over tokens of what tells how its MLP's channels are felt.

    "mlp_energy" and "mlp_gradient" are the squares of each channel and of its gradient, "mlp_fisher" the squared
    gradients of masks on all channels, each at one token: gradients of labels sampled apart hardly add up over tokens,
    and single tokens are far more samples than blocks of them.
    """
    with ExitStack() as stack:
        for number, site in enumerate(sites):
            mlp = mlp_of(site)
            if mlp is not None:
                stack.callback(_watch(mlp.down, number, see).remove)
        yield


def channel_losses(sums: Sums) -> Tensor:
    """Predicted loss increase of removing each channel: its energy times that of its gradient, (M,).

    That product of means is far less noisy than the mean of products, which a few tokens decide, and orders channels
    better; all together lose what the mean of products says.
    """
    felt_M = sums.mean("mlp_energy") * sums.mean("mlp_gradient")
    return felt_M * (sums.mean("mlp_fisher") / 2 / felt_M.sum().clamp(min=torch.finfo(felt_M.dtype).tiny))


def _watch(down: nn.Module, number: int, see: See) -> RemovableHandle:
    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not torch.is_grad_enabled() or not args[0].requires_grad:
            return
        x_NM = args[0].detach().flatten(0, -2).float()  # a hook must not hold the tensor it hangs on

        def leave(gradient: Tensor) -> None:
            see(number, _sums(x_NM, gradient.flatten(0, -2).float()))

        args[0].register_hook(leave)

    return down.register_forward_pre_hook(enter)


def _sums(x_NM: Tensor, gradient_NM: Tensor) -> dict[str, Tensor]:
    norm_N = gradient_NM.norm(dim=1)
    largest = norm_N.sort().values[int(CLIPPED * (len(norm_N) - 1))]
    clipped_NM = gradient_NM * (largest / norm_N.clamp(min=torch.finfo(norm_N.dtype).tiny)).clamp(max=1)[:, None]
    return {
        "mlp_energy": x_NM.square().sum(0),
        "mlp_gradient": clipped_NM.square().sum(0),
        "mlp_fisher": (x_NM * gradient_NM).square().sum(),
    }
