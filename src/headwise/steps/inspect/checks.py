"""Prediction against truth: real students at a few budgets, before anything is refitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.measured import kept_directions
from headwise.families.own_loss import mean_divergences
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
    measured = mean_divergences(model, students, batches)
    return tuple((rounded(guess), rounded(found)) for guess, found in zip(predicted, measured, strict=True))
