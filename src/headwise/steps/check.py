"""Prediction against truth: real reduced models at a few budgets, refitted, on inputs that were held out."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from headwise.checkpoints.profiled import Profile
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.records.budget import Budget, natural_budget
from headwise.records.profile import Check, rounded
from headwise.records.settings import OpenConfig
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.tracing.fisher import measure_distance
from headwise.tracing.placement import running

SHARES = (0.75, 0.5)  # each takes a refit, as long as a few passes over the text


def check(
    model: PreTrainedModel, profile: Profile, *, opening: OpenConfig | None = None, progress: Progress = silent
) -> Profile:
    """``profile`` with checks: predicted and measured loss increase of plans for a few shares of cache or weights.

    ``model`` is the one that was measured, and is left as it was.
    """
    with running(model, opening):
        return replace(profile, checks=check_predictions(model, profile, progress))


def check_predictions(model: PreTrainedModel, profile: Profile, progress: Progress = silent) -> tuple[Check, ...]:
    """Predicted and measured loss increase of plans for a few shares of the cache (or the weights)."""
    held_out = profile.held_out()
    kind, checks = natural_budget(profile.shape), []
    for number, share in enumerate(SHARES if held_out else ()):
        progress(number, len(SHARES), "checking")
        try:
            plan = plan_for(profile, Budget(kind, share))
        except InputError:
            continue  # too narrow heads for so much less, or measured on too little
        reduced = reduce_model(model, plan, profile.tensors, form="per-layer")
        measured = reduced.distance or measure_distance(model, reduced.model, held_out)
        parts = {name: rounded(nats) for name, (nats, _) in measured.nats.table().items()}
        agreement = None if measured.agreement is None else rounded(measured.agreement)
        checks.append(
            Check(rounded(float(plan.predicted["loss_increase"])), rounded(measured.divergence), parts, agreement)
        )
    return tuple(checks)
