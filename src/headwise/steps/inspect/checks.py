"""Prediction against truth: real students at a few budgets, before anything is refitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.measured import kept_directions
from headwise.families.own_loss import own_divergence
from headwise.families.student import build_student
from headwise.records.budget import Budget, natural_budget
from headwise.records.errors import InputError
from headwise.records.planning import plan_for
from headwise.records.profile import Profile, rounded

SHARES = (0.875, 0.75, 0.5)
TOKENS = 2048


def check_predictions(
    model: PreTrainedModel, profile: Profile, tensors: Mapping[str, Tensor], batches: Sequence[dict[str, Tensor]]
) -> tuple[tuple[float, float], ...]:
    """Predicted and measured damage, in nats per output, of plans for a few shares of the cache (or the weights)."""
    kind, predicted, students = natural_budget(profile.shape), [], []
    for share in SHARES:
        try:
            plan = plan_for(profile, Budget(kind, share))
        except InputError:
            continue  # too narrow heads for so much less
        kept = kept_directions(profile.shape, plan, tensors)
        students.append(build_student(model, plan, kept=kept, form="per-layer", share=True))
        predicted.append(float(plan.predicted["damage"]))
    totals, rows = [0.0] * len(students), 0
    with torch.inference_mode():
        for batch in batches:
            whole = _run(model, batch)
            found = [own_divergence(whole, _run(student, batch)) for student in students]
            totals = [total + some for total, (some, _) in zip(totals, found, strict=True)]
            rows += found[0][1] if found else 0
    return tuple((rounded(guess), rounded(total / rows)) for guess, total in zip(predicted, totals, strict=True))


def _run(model: PreTrainedModel, batch: dict[str, Tensor]) -> Any:
    caching = {"use_cache": False} if model.can_generate() else {}
    inputs = {
        name: tensor.to(model.device, model.dtype) if tensor.is_floating_point() else tensor.to(model.device)
        for name, tensor in batch.items()
    }
    return model(**inputs, **caching)
