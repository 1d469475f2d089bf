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
from headwise.tracing.rounding import rounding

SHARES = (0.75, 0.5)  # each takes a refit, as long as a few passes over the text
ROUNDED_SHARES, ROUNDED_AT = (0.25, 0.15), 4096  # of the bytes at so many tokens


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
    plans = [(share, "none") for share in SHARES]
    if any("k_bit_damage" in layer.values for layer in profile.layers):
        plans += [(share, "mixed") for share in ROUNDED_SHARES]
    for number, (share, cache) in enumerate(plans if held_out else ()):
        progress(number, len(plans), "checking")
        try:
            plan = plan_for(profile, Budget(kind, share, ROUNDED_AT if cache == "mixed" else None), cache=cache)
        except InputError:
            continue  # too narrow heads for so much less, or measured on too little
        reduced = reduce_model(model, plan, profile.tensors, form="per-layer" if cache == "none" else "auto")
        measured = reduced.distance
        if measured is None:
            with rounding(reduced.model, reduced.codes):
                measured = measure_distance(model, reduced.model, held_out)
        parts = {name: rounded(nats) for name, (nats, _) in measured.nats.table().items()}
        agreement = None if measured.agreement is None else rounded(measured.agreement)
        predicted, nats = rounded(float(plan.predicted["loss_increase"])), rounded(measured.divergence)
        checks.append(Check(predicted, nats, parts, agreement, reduced.codes is not None))
    return tuple(checks)
