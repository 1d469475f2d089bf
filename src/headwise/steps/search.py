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

from headwise.checkpoints.loaded import Loaded
from headwise.checkpoints.profile_tensors import check_profile_inputs, profiled_batches
from headwise.checkpoints.profiled import Profile, check_measured
from headwise.data.calibration import Batch, evaluation_windows
from headwise.data.texts import Files, Text, texts_of
from headwise.data.windows import has_chat
from headwise.families.shapes import shape_of
from headwise.files.errors import BudgetError, InputError
from headwise.files.progress import Progress, silent
from headwise.records.budget import Budget, natural_budget
from headwise.records.plan import Plan
from headwise.records.settings import OpenConfig, ReadConfig
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.tracing.fisher import measure_distance
from headwise.tracing.placement import place, running
from headwise.tracing.rounding import rounding
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
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
    merge: bool = False,
    absorb: bool = False,
    cache: str = "none",
    context: int | None = None,
    dtype: str = "bf16",
    progress: Progress = silent,
) -> tuple[Plan, Profile]:
    """The plan that `search_plan` finds for the model that ``folder`` holds a profile of; and that profile.

    The model is still where it was. ``texts`` are files.
    """
    profile, opening = Profile.load(folder), opening or OpenConfig()
    loaded = Loaded.of(str(profile.model["source"]), opening=opening)
    loaded.fingerprint()
    place(loaded.model, opening)  # for good: nobody else has it
    plan = search_plan(
        loaded,
        profile,
        bound,
        text=Files(texts) if texts else None,
        reading=reading,
        opening=opening,
        multiple=multiple,
        protect=protect,
        uniform=uniform,
        merge=merge,
        absorb=absorb,
        cache=cache,
        context=context,
        dtype=dtype,
        where=str(folder),
        progress=progress,
    )
    plan = replace(plan, profile=str(folder.resolve()))
    if output is not None:
        plan.save(output)
    return plan, profile


def search_plan(
    loaded: Loaded,
    profile: Profile,
    bound: float,
    *,
    text: Any = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    multiple: int = 8,
    protect: Collection[int] = (),
    uniform: bool = False,
    merge: bool = False,
    absorb: bool = False,
    cache: str = "none",
    context: int | None = None,
    dtype: str = "bf16",
    where: str = "The profile",
    progress: Progress = silent,
) -> Plan:
    """The plan with the least cache (or weights) whose refitted model loses at most ``bound`` nats.

    Decoders are measured by the increase of their log-perplexity, other models by their divergence: on what the profile
    held out, or on ``text``, of which windows that were calibrated on are left out.
    """
    if shape_of(loaded.model).as_known_to(profile.shape) != profile.shape:
        raise InputError(f"{loaded.name} is no longer the model that {where} is a profile of.")
    check_measured(profile, where, loaded.name, loaded.fingerprint())
    check_profile_inputs(loaded.model, profile.tensors)
    options: dict[str, Any] = {
        "multiple": multiple,
        "protect": protect,
        "uniform": uniform,
        "merge": merge,
        "absorb": absorb,
        "cache": cache,
    }
    with running(loaded.model, loaded.opening(opening)):
        unseen = _measured_on(loaded, profile, text, reading or ReadConfig())
        return _bisect(loaded, profile, bound, unseen, options, context, dtype, progress)


def _measured_on(loaded: Loaded, profile: Profile, text: Any, reading: ReadConfig) -> list[Batch]:
    """The windows that reduced models are measured on."""
    if text is not None:
        tokenizer = loaded.tokenizer()
        texts = texts_of(text, reading.text_format, chat=has_chat(tokenizer))
        return _unseen(loaded.model, profile, loaded.name, profile.tensors, tokenizer, texts, reading.accept_text)
    unseen = profile.held_out()
    if not unseen:
        raise InputError("This profile held nothing out to measure on: give other text as `text`.")
    return unseen


def _bisect(
    loaded: Loaded,
    profile: Profile,
    bound: float,
    unseen: list[Batch],
    options: dict[str, Any],
    context: int | None,
    dtype: str,
    progress: Progress,
) -> Plan:
    model, source, tensors = loaded.model, loaded.name, profile.tensors
    kind, rounds = natural_budget(profile.shape), math.ceil(math.log2(STEPS))
    best = plan_for(profile, Budget(kind, 1.0, context, dtype=dtype), **options)  # says what is wrong with the options
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
        reduced = reduce_model(model, plan, tensors, form="stock" if options["uniform"] else "auto")
        with rounding(reduced.model, reduced.codes):
            measured = loss_increase(reduced.model)
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
    return replace(
        best, budget={**best.budget, "max_loss_increase": bound}, predicted={**best.predicted, "unseen": tokens}
    )


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
