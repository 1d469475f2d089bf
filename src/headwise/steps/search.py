"""The smallest model whose measured loss increase stays within a bound: bisection over budgets, by forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.load import open_model
from headwise.checkpoints.profile_tensors import HELD_OUT, check_profile_inputs, profiled_batches
from headwise.checkpoints.profiled import check_measured, open_profile
from headwise.data.calibration import Batch, evaluation_windows
from headwise.data.processors import open_tokenizer
from headwise.data.texts import Text, read_texts
from headwise.data.windows import has_chat
from headwise.families.shapes import shape_of
from headwise.files.errors import BudgetError, InputError
from headwise.files.progress import Progress, silent
from headwise.records.budget import Budget, natural_budget
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.settings import TextFormat
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.tracing.fisher import measure_distance
from headwise.tracing.scoring import predicts_next, text_losses

STEPS = 64  # the share is found to 1/64
TOKENS, MOST_TOKENS = 4096, 65_536  # to measure on; to choose them from
WINDOW = 1024
STRETCH = 12  # tokens in a row that two texts hardly share by chance


def plan_within(
    folder: Path,
    output: Path | None,
    bound: float,
    *,
    texts: Sequence[str] = (),
    text_format: TextFormat = "auto",
    accept_text: bool = False,
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
    context: int | None = None,
    dtype: str = "bf16",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> tuple[Plan, Profile]:
    """The plan with the least cache (or weights) whose refitted model loses at most ``bound`` nats; and its profile.

    ``folder`` holds the profile of a model that is still where it was. Decoders are measured by the increase of their
    log-perplexity, other models by their divergence: on what the profile held out, or on ``texts``, of which windows
    that were calibrated on are left out.
    """
    profile, tensors = open_profile(folder)
    source = str(profile.model["source"])
    model = open_model(source)
    if shape_of(model) != profile.shape:
        raise InputError(f"{source} is no longer the model that {folder} is a profile of.")
    check_measured(profile, folder, source, fingerprint(model))
    check_profile_inputs(model, tensors)
    model.float()
    kind, rounds = natural_budget(profile.shape), math.ceil(math.log2(STEPS))
    options: dict[str, Any] = {"multiple": multiple, "protect": protect, "uniform": uniform}
    best = plan_for(profile, Budget(kind, 1.0, context, dtype=dtype), **options)  # says what is wrong with the options
    unseen = profiled_batches(tensors, HELD_OUT)
    if texts:
        tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
        read = read_texts(texts, text_format, chat=has_chat(tokenizer))
        unseen = _unseen(model, profile, source, tensors, tokenizer, read, accept_text)
    elif not unseen:
        raise InputError("This profile held nothing out to measure on: give other text with --text.")
    loss_increase = _loss_increase(model, source, unseen)
    too_small, fine, least = 0, STEPS, math.inf
    while fine - too_small > 1:
        tried = (fine + too_small) // 2
        progress(rounds - math.ceil(math.log2(fine - too_small)), rounds, f"trying {tried / STEPS:.1%}")
        try:
            plan = plan_for(profile, Budget(kind, tried / STEPS, context, dtype=dtype), **options)
        except BudgetError:
            too_small = tried
            continue
        measured = loss_increase(reduce_model(model, plan, tensors, form="stock" if uniform else "auto").model)
        least = min(least, measured)
        if measured <= bound:
            fine, best = tried, replace(plan, predicted={**plan.predicted, "measured": measured})
        else:
            too_small = tried
    if fine == STEPS:
        raise InputError(
            f"No cut stays within {bound:.3g} nats: the mildest that was tried costs {least:.3g}. Allow more."
        )
    tokens = sum(batch.inputs[model.main_input_name].shape[:2].numel() for batch in unseen)
    plan = replace(
        best,
        budget={**best.budget, "max_loss_increase": bound},
        predicted={**best.predicted, "unseen": tokens},
        profile=str(folder.resolve()),
    )
    if output is not None:
        plan.save(output)
    return plan, profile


def _unseen(
    model: PreTrainedModel,
    profile: Profile,
    source: str,
    tensors: Mapping[str, Tensor],
    tokenizer: Any,
    texts: Sequence[Text],
    accept: bool,
) -> list[Batch]:
    """Windows of ``texts`` of which nothing was calibrated on."""
    calibrated = {stretch for batch in profiled_batches(tensors) for stretch in _stretches(batch.inputs["input_ids"])}
    window = int(profile.settings.get("context", 0)) or profile.shape.max_tokens
    windows = evaluation_windows(
        model, profile.shape, source, tokenizer, texts, MOST_TOKENS, min(WINDOW, window), accept=accept
    )
    unseen = [
        Batch({"input_ids": row[None]}, len(row), (), batch.kind)
        for batch in windows.batches
        for row in batch.inputs["input_ids"]
        if not _stretches(row[None]) & calibrated
    ]
    if not unseen:
        raise InputError(f"All of {windows.name} was calibrated on: give text that the model was not measured on.")
    chosen = np.linspace(0, len(unseen) - 1, min(len(unseen), max(1, TOKENS // unseen[0].tokens))).round().astype(int)
    return [unseen[place] for place in chosen]


def _stretches(ids_BT: Tensor) -> set[tuple[int, ...]]:
    """All runs of a dozen tokens: two texts that share one share a passage."""
    rows = ids_BT.tolist()
    return {tuple(row[start : start + STRETCH]) for row in rows for start in range(len(row) - STRETCH + 1)}


def _loss_increase(model: PreTrainedModel, source: str, batches: Sequence[Batch]) -> Callable[[PreTrainedModel], float]:
    if not predicts_next(model):
        return lambda other: measure_distance(model, other, batches).divergence
    before = cast(float, text_losses(model, source, batches).mean())
    return lambda other: cast(float, text_losses(other, source, batches).mean()) - before
