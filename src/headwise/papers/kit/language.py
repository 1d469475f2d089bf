"""Small language models over characters of headwise's own texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.papers.kit.data import SYMBOLS, characters, windows
from headwise.papers.kit.small import Shape, Small
from headwise.papers.kit.training import fit, seeded

EVALUATION = 32  # windows


@dataclass(frozen=True, slots=True)
class Reading:
    """The training of a language model: windows of ``length`` characters, ``batch`` at once, for ``steps``."""

    length: int
    batch: int
    steps: int
    rate: float = 2e-3


def language_model(shape: Shape, reading: Reading, seed: int) -> Small:
    """A trained model of ``shape``."""
    model = seeded(seed, lambda: Small(shape, nn.Embedding(SYMBOLS, shape.width), SYMBOLS))
    teach(model, reading, seed)
    return model


def teach(model: nn.Module, reading: Reading, seed: int) -> list[float]:
    """Train a model on the text, in place; returns its losses."""
    batch = windows(characters().train, reading.length, reading.batch)
    return fit(model, batch, next_loss, steps=reading.steps, rate=reading.rate, seed=seed, decay=0.01)


def next_loss(logits_BTS: Tensor, next_BT: Tensor) -> Tensor:
    """Mean nats per character."""
    return F.cross_entropy(logits_BTS.flatten(0, 1), next_BT.flatten())


def held_out(length: int, count: int = EVALUATION) -> tuple[Tensor, Tensor]:
    """The same windows of held-out text every time."""
    return windows(characters().validation, length, count)(torch.Generator().manual_seed(0))


@torch.no_grad()
def validation_loss(model: nn.Module, length: int, count: int = EVALUATION) -> float:
    """Nats per character of ``count`` windows of held-out text."""
    inputs, targets = held_out(length, count)
    losses = [next_loss(model(a), b) for a, b in zip(inputs.split(8), targets.split(8))]
    return float(torch.stack(losses).mean())
