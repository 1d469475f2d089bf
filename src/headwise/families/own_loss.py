"""The loss of a model against itself: labels drawn from its own output, so that gradients tell how it would change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.forward import forward
from headwise.linalg.divergence import divergence
from headwise.records.errors import InputError

ROWS_AT_ONCE = 128  # drawing takes twice the memory of what is drawn from


def backward_from_own_output(outputs: Any, seed: int) -> None:
    """Backpropagate ``-log p(y)`` with ``y`` drawn from the model's own output.

    The squared gradients of this loss are Fisher information: how fast the output's KL divergence grows. Models with a
    head draw classes or tokens; models without one draw from a normal distribution around their output whose variance
    is its mean square, so that the loss is half the relative square error.
    """
    output, categorical = main_output(outputs)
    if not output.isfinite().all():
        raise InputError("The model's output is NaN or infinite: its weights are damaged or overflow.")
    generator = torch.Generator(device=output.device).manual_seed(seed)
    gradient = _class_score(output, generator) if categorical else _normal_score(output, generator)
    output.backward(gradient)


def own_divergence(outputs: Any, others: Any) -> float:
    """The KL divergence of ``others`` from a model's own ``outputs`` that this loss predicts, summed over rows."""
    (wanted, categorical), (found, _) = main_output(outputs), main_output(others)
    if categorical:
        return divergence(wanted.flatten(0, -2), found.flatten(0, -2))
    return ((found - wanted).square().sum() / (2 * wanted.square().sum(-1).mean())).item()


def mean_divergences(
    model: PreTrainedModel, students: Sequence[PreTrainedModel], batches: Iterable[dict[str, Tensor]]
) -> list[float]:
    """`own_divergence` of each student from ``model``, per row, over all batches."""
    totals, rows = [0.0] * len(students), 0
    with torch.inference_mode():
        for batch in batches:
            whole = forward(model, batch)
            for i, student in enumerate(students):
                totals[i] += own_divergence(whole, forward(student, batch))
            rows += main_output(whole)[0].shape[:-1].numel()
    return [total / rows for total in totals]


def main_output(outputs: Any) -> tuple[Tensor, bool]:
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
