"""A plain training loop for small models: AdamW, warm-up, cosine to zero, one thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
WARM_UP = 0.05
CLIP = 1.0


def fit(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    *,
    steps: int,
    rate: float,
    seed: int,
    decay: float = 0.0,
) -> list[float]:
    """Train ``model`` in place; returns the losses of all steps. Batches and dropout depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _fit(model, batch, loss, generator, steps, rate, decay)


def _fit(
    model: nn.Module, batch: Batch, loss: Loss, generator: torch.Generator, steps: int, rate: float, decay: float
) -> list[float]:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=decay, fused=True)
    losses = []
    model.train()
    for step in range(steps):
        share = step / steps
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (share + 1 / steps) / WARM_UP) * (1 + math.cos(math.pi * share)) / 2
        inputs, targets = batch(generator)
        value = loss(model(inputs), targets)
        optimiser.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimiser.step()
        losses.append(float(value.detach()))
    model.eval()
    return losses


def seeded(seed: int, build: Callable[[], Model]) -> Model:
    """A model whose initial weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
