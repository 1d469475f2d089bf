"""The smallest model whose measured damage stays within a bound: bisection over budgets, on real forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.calibration import Calibration, other_windows
from headwise.families.fingerprint import fingerprint
from headwise.families.load import open_model
from headwise.families.own_loss import mean_divergences
from headwise.families.profiled import check_measured, open_profile
from headwise.families.reduce import profiled_inputs, reduce_model
from headwise.families.scoring import predicts_next, quality
from headwise.families.shapes import shape_of
from headwise.families.texts import read_texts
from headwise.records.budget import Budget, natural_budget
from headwise.records.errors import InputError
from headwise.records.plan import Plan
from headwise.records.planning import plan_for
from headwise.records.profile import Profile

STEPS = 64  # the share is found to 1/64
TOKENS = 4096
Progress = Callable[[int, int, str], None]


def plan_within(
    folder: Path,
    output: Path | None,
    bound: float,
    *,
    texts: Sequence[str] = (),
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> tuple[Plan, Profile]:
    """The plan with the least cache (or weights) whose refitted model loses at most ``bound`` nats; and its profile.

    ``folder`` holds the profile of a model that is still where it was. Decoders are measured by the increase of their
    log-perplexity on ``texts``, between the windows that were calibrated on; other models by their divergence on the
    profile's own inputs.
    """
    profile, tensors = open_profile(folder)
    source = str(profile.model["source"])
    model = open_model(source)
    if shape_of(model) != profile.shape:
        raise InputError(f"{source} is no longer the model that {folder} is a profile of.")
    check_measured(profile, folder, source, fingerprint(model))
    model.float()
    if predicts_next(model):
        damage = _damage_on_text(model, profile, source, texts)
    else:
        damage = partial(_divergence, model, profiled_inputs(tensors))
    kind, rounds = natural_budget(profile.shape), math.ceil(math.log2(STEPS))
    too_small, fine, best, least = 0, STEPS, Plan.full(profile.shape), math.inf
    while fine - too_small > 1:
        tried = (fine + too_small) // 2
        progress(rounds - math.ceil(math.log2(fine - too_small)), rounds, f"trying {tried / STEPS:.1%}")
        try:
            plan = plan_for(profile, Budget(kind, tried / STEPS), multiple=multiple, protect=protect, uniform=uniform)
        except InputError:
            too_small = tried
            continue
        student, _, _ = reduce_model(model, plan, tensors, form="stock" if uniform else "auto")
        found = damage(student)
        least = min(least, found)
        if found <= bound:
            fine, best = tried, replace(plan, predicted={**plan.predicted, "measured": found})
        else:
            too_small = tried
    if fine == STEPS:
        raise InputError(
            f"No cut stays within {bound:.3g} nats: the mildest that was tried costs {least:.3g}. Allow more damage."
        )
    made = replace(best, budget={**best.budget, "max_damage": bound}, profile=str(folder.resolve()))
    if output is not None:
        made.save(output)
    return made, profile


def read_bound(text: str) -> float:
    """Nats that ``text`` allows: "2%" more perplexity, or "0.02" nats."""
    try:
        bound = math.log1p(float(text[:-1]) / 100) if text.endswith("%") else float(text)
    except ValueError:
        bound = math.nan
    if not 0 < bound < math.inf:
        raise InputError(f'Damage is a percentage of perplexity such as "2%", or nats such as "0.02", got {text!r}.')
    return bound


def _damage_on_text(
    model: PreTrainedModel, profile: Profile, source: str, texts: Sequence[str]
) -> Callable[[PreTrainedModel], float]:
    text, name = read_texts(texts)
    held_out = other_windows(model, profile.shape, source, text, name, int(profile.settings["tokens"]), TOKENS)
    before = _loss(model, source, held_out)
    return lambda student: _loss(student, source, held_out) - before


def _loss(model: PreTrainedModel, source: str, calibration: Calibration) -> float:
    found = quality(model, source, calibration, None, lambda done, total: None).loss
    assert found is not None, "only decoders come here"
    return found


def _divergence(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], student: PreTrainedModel) -> float:
    return mean_divergences(model, [student], batches)[0]
