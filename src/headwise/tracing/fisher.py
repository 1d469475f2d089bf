"""Fisher gradients (labels sampled from the model), and the KL divergence from a baseline that they predict."""

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

ROWS_AT_ONCE = 128  # sampling takes twice the memory of the probabilities


def backward_from_sampled_labels(outputs: Any, seed: int) -> None:
    """Backpropagate ``-log p(y)`` with labels ``y`` sampled from the model's output.

    The squared gradients of this loss are Fisher information: how fast the output's KL divergence grows. Models with a
    head sample classes or tokens; models without one sample from a normal distribution around their output whose
    variance is its mean square, so that the loss is half the relative square error.
    """
    output, categorical = main_output(outputs)
    if not output.isfinite().all():
        raise InputError("The model's output is NaN or infinite: its weights are damaged or overflow.")
    generator = torch.Generator(device=output.device).manual_seed(seed)
    gradient = _class_score(output, generator) if categorical else _normal_score(output, generator)
    output.backward(gradient)


def kl_from_baseline(baseline_outputs: Any, outputs: Any) -> Tensor:
    """KL divergence of ``outputs`` from the baseline's, (B, T); without a head, half the relative square error."""
    (baseline, categorical), (output, _) = main_output(baseline_outputs), main_output(outputs)
    if categorical:
        nats = divergences(baseline.flatten(0, -2), output.flatten(0, -2)).view(baseline.shape[:-1])
    else:
        nats = (output - baseline).square().sum(-1) / (2 * baseline.square().sum(-1).mean())
    return nats.view(len(baseline), -1)


class Distance:
    """Distance of a model from its baseline: KL of the outputs and, without a head, cosine of the embeddings."""

    def __init__(self) -> None:
        self.nats = Parts()
        self._cosines: list[Tensor] = []

    def add(self, batch: Batch, baseline_outputs: Any, outputs: Any) -> None:
        """Add the outputs of both models for one batch."""
        self.nats.add(batch.kind, kl_from_baseline(baseline_outputs, outputs))
        (baseline, categorical), (output, _) = main_output(baseline_outputs), main_output(outputs)
        if not categorical and baseline.ndim == 3:  # noqa: PLR2004 - a state for each token
            self._cosines.append(cosine_similarity(baseline.float().mean(1), output.float().mean(1), dim=-1).cpu())

    @property
    def agreement(self) -> float | None:
        """Mean cosine of the embeddings (means of the last hidden states); None of a model with a head."""
        return torch.cat(self._cosines).mean().item() if self._cosines else None

    @property
    def divergence(self) -> float:
        """Nats per output."""
        return cast(float, self.nats.mean())

    @property
    def error(self) -> float:
        """The one number to choose by: 1 - cosine where embeddings are what the model is used for, KL otherwise."""
        return self.divergence if self.agreement is None else 1 - self.agreement


def measure_distance(baseline: PreTrainedModel, model: PreTrainedModel, batches: Iterable[Batch]) -> Distance:
    """Distance of ``model`` from ``baseline`` over all batches."""
    distance = Distance()
    with torch.inference_mode():
        for batch in batches:
            distance.add(batch, forward(baseline, batch.inputs), forward(model, batch.inputs))
    return distance


def main_output(outputs: Any) -> tuple[Tensor, bool]:
    """A model's main output (logits or hidden states), and whether it is a distribution over classes."""
    name, output = next(iter(outputs.items()))
    return output, name.endswith("logits") and output.shape[-1] > 1


def _class_score(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient of ``-log p(y)``: the probabilities, minus one at the sampled class."""
    score = logits.detach().float().softmax(-1)
    for rows in score.flatten(0, -2).split(ROWS_AT_ONCE):
        labels = torch.multinomial(rows, 1, generator=generator)
        rows.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=rows.dtype))
    return score.to(logits.dtype)


def _normal_score(state: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(state.shape, generator=generator, device=state.device)
    size = state.detach().float().square().sum(-1).mean().sqrt()
    return (noise / size.clamp(min=1e-12)).to(state.dtype)
