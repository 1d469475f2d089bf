"""The loss of a model against itself: labels drawn from its own output, so that gradients tell how it would change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.linalg.divergence import divergence

ROWS_AT_ONCE = 128  # drawing takes twice the memory of what is drawn from


def backward_from_own_output(outputs: Any, seed: int) -> None:
    """Backpropagate ``-log p(y)`` with ``y`` drawn from the model's own output.

    The squared gradients of this loss are Fisher information: how fast the output's KL divergence grows. Models with a
    head draw classes or tokens; models without one draw from a normal distribution around their output whose variance
    is its mean square, so that the loss is half the relative square error.
    """
    output, categorical = _output(outputs)
    generator = torch.Generator(device=output.device).manual_seed(seed)
    gradient = _class_score(output, generator) if categorical else _normal_score(output, generator)
    output.backward(gradient)


def own_divergence(outputs: Any, others: Any) -> tuple[float, int]:
    """The KL divergence of ``others`` from a model's own ``outputs`` that this loss predicts, summed, and its rows."""
    (wanted, categorical), (found, _) = _output(outputs), _output(others)
    rows = wanted.shape[:-1].numel()
    if categorical:
        return divergence(wanted.flatten(0, -2), found.flatten(0, -2)), rows
    return ((found - wanted).square().sum() / (2 * wanted.square().sum(-1).mean())).item(), rows


def _output(outputs: Any) -> tuple[Tensor, bool]:
    """What a model gives, and whether that are classes to draw from."""
    name, output = next(iter(outputs.items()))
    return output, name.endswith("logits") and output.shape[-1] > 1


def _class_score(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient of ``-log p(y)``: the probabilities, minus one at the class that was drawn."""
    score = logits.detach().float().softmax(-1)
    for rows in score.flatten(0, -2).split(ROWS_AT_ONCE):
        drawn = torch.multinomial(rows, 1, generator=generator)
        rows.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=rows.dtype))
    return score.to(logits.dtype)


def _normal_score(state: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(state.shape, generator=generator, device=state.device)
    size = state.detach().float().square().sum(-1).mean().sqrt()
    return (noise / size.clamp(min=1e-12)).to(state.dtype)
