"""The last projection of a cut MLP, fitted so that the residual stream comes out as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.families.mlp import MlpSite, read_mlp, write_mlp
from headwise.linalg.refit import OutputFit
from headwise.tracing.stream import Stream


def behind_mlp(stream: Stream, mlp: MlpSite, block: int, number: int) -> tuple[Tensor, Tensor]:
    """The residual stream behind an MLP, in front of any norm, and the channels that its last projection reads."""
    seen: dict[str, Any] = {}
    handles = [
        mlp.up.register_forward_pre_hook(lambda module, args: seen.update(given=args[0])),
        mlp.down.register_forward_hook(lambda module, args, output: seen.update(channels=args[0], added=output)),
    ]
    try:
        out = stream.run(block, number)
    finally:
        for handle in handles:
            handle.remove()
    return (seen["given"] + seen["added"] if mlp.norm_after else out), seen["channels"]


def fit_down(stream: Stream, mlp: MlpSite, block: int, wanted: Sequence[Tensor], fitted: int) -> None:
    """Fit the last projection of ``mlp`` so that the stream behind it is ``wanted``, batch by batch.

    It is fitted to the first ``fitted`` batches, and left as it is where that does not help on those behind. Tokens
    count as in the fit of attention outputs: by the inverse of their energy.
    """
    weights, fit = read_mlp(mlp), OutputFit()
    w_down = weights.w_down_MD
    for n, before in enumerate(wanted):
        reached, channels = (each.flatten(0, -2) for each in behind_mlp(stream, mlp, block, n))
        target = before.flatten(0, -2)
        if weights.b_down_D is not None:
            channels = torch.cat((channels, channels.new_ones(len(channels), 1)), dim=1)
        energy = target.square().mean(-1)
        weight = 1 / energy.clamp(min=torch.finfo(target.dtype).tiny)
        fit.add(channels, target - reached, weight, held_out=n >= fitted)
    correction = fit.solve().to(w_down.dtype)
    bias = None if weights.b_down_D is None else weights.b_down_D + correction[-1]
    write_mlp(mlp, replace(weights, w_down_MD=w_down + correction[: len(w_down)], b_down_D=bias))
