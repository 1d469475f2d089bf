"""Small classifiers of pixels and of characters, and the ranks of their first attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.linalg.ranks import gram_singular_values, hard_rank, numerical_rank
from headwise.papers.kit.data import SYMBOLS, Labelled, batches, chapters, digits
from headwise.papers.kit.small import Classifier, Heads, Shape
from headwise.papers.kit.training import fit, seeded

WIDTH, HEADS, BATCH = 48, 2, 64
LABELS, LENGTH = 8, 64
RELATIVE = 1e-2
LOOKED_AT = 64


def train_classifier(data: str, sizes: Heads, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy and loss of a two-layer classifier, and rank over n of its first layer before and after."""
    labelled = _data(data)
    shape = Shape(WIDTH, (sizes,) * 2, 2 * WIDTH, labelled.inputs.shape[1], False)
    reads = (lambda: nn.Linear(1, WIDTH)) if data == "digits" else (lambda: nn.Embedding(SYMBOLS, WIDTH))
    labels = int(labelled.labels.max()) + 1
    model = seeded(seed, lambda: Classifier(shape, reads(), labels))
    before = _ranks(model, labelled)
    fit(model, batches(labelled, BATCH), F.cross_entropy, steps=steps, rate=2e-3, seed=seed)
    with torch.no_grad():
        logits = torch.cat([model(part) for part in labelled.inputs.split(BATCH)])
    right = (logits.argmax(1) == labelled.labels).float()
    losses = F.cross_entropy(logits, labelled.labels, reduction="none")
    return {
        "train": float(right[: labelled.train].mean()),
        "held_out": float(right[labelled.train :].mean()),
        "train_loss": float(losses[: labelled.train].mean()),
        "before": before,
        "after": _ranks(model, labelled),
    }


def _data(name: str) -> Labelled:
    if name == "chapters":
        return chapters(LABELS, LENGTH, 300)
    images = digits()
    return Labelled(images.inputs.flatten(1)[..., None], images.labels, images.train)


@torch.no_grad()
def _ranks(model: Classifier, data: Labelled) -> dict[str, float]:
    """Mean hard and numerical rank over n of the first layer's maps on held-out inputs."""
    inputs = data.inputs[-LOOKED_AT:]
    x_BTD: Tensor = model.body.attention_inputs(inputs)[0]
    maps_BHTT = model.body.attentions()[0].weights(x_BTD)
    n = maps_BHTT.shape[-1]
    hard = hard_rank(maps_BHTT.argmax(-1), n).double().mean() / n
    numerical = numerical_rank(gram_singular_values(maps_BHTT), RELATIVE).double().mean() / n
    return {"hard": float(hard), "numerical": float(numerical)}
