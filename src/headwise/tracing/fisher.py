"""The loss of a model against itself: labels drawn from its own output, so that gradients tell how it would change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from headwise.data.calibration import Batch
from headwise.files.errors import InputError
from headwise.linalg.divergence import divergences
from headwise.tracing.forward import forward
from headwise.tracing.parts import Parts

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


def own_divergences(outputs: Any, others: Any) -> Tensor:
    """The KL divergence of ``others`` from a model's own ``outputs`` that this loss predicts, of each output (B, T)."""
    (wanted, categorical), (found, _) = main_output(outputs), main_output(others)
    if categorical:
        nats = divergences(wanted.flatten(0, -2), found.flatten(0, -2)).view(wanted.shape[:-1])
    else:
        nats = (found - wanted).square().sum(-1) / (2 * wanted.square().sum(-1).mean())
    return nats.view(len(wanted), -1)


class Distance:
    """How far a model is from another one: divergence of its outputs, and of a model without a head the embeddings."""

    def __init__(self) -> None:
        self.nats = Parts()
        self._cosines: list[Tensor] = []

    def add(self, batch: Batch, outputs: Any, others: Any) -> None:
        """Add what both make of a batch."""
        self.nats.add(batch.kind, own_divergences(outputs, others))
        (wanted, categorical), (found, _) = main_output(outputs), main_output(others)
        if not categorical and wanted.ndim == 3:  # noqa: PLR2004 - a state for each token
            self._cosines.append(cosine_similarity(wanted.float().mean(1), found.float().mean(1), dim=-1).cpu())

    @property
    def agreement(self) -> float | None:
        """Mean cosine of the embeddings (the mean of the last states); None of a model with a head."""
        return torch.cat(self._cosines).mean().item() if self._cosines else None

    @property
    def divergence(self) -> float:
        """Nats per output."""
        return cast(float, self.nats.mean())

    @property
    def error(self) -> float:
        """The one number to choose by: what people use of such a model should change least."""
        return self.divergence if self.agreement is None else 1 - self.agreement


def measure_distance(model: PreTrainedModel, other: PreTrainedModel, batches: Iterable[Batch]) -> Distance:
    """How far ``other`` is from ``model`` over all batches."""
    distance = Distance()
    with torch.inference_mode():
        for batch in batches:
            distance.add(batch, forward(model, batch.inputs), forward(other, batch.inputs))
    return distance


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
