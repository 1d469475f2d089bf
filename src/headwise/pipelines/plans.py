"""From a profile to a plan: within a budget at once, within a bound on the measured loss by building reduced models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.records.budget import Budget
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.settings import BoundConfig, BudgetConfig, CacheConfig, OpenConfig, PlanConfig, ReadConfig
from headwise.reduction.plans import plan_for
from headwise.steps.plan import make_plan, profile_file, read_budget, read_layers


def plan(
    profile: Profile | Path | str,
    *,
    keep_kv: float | None = None,
    keep_params: float | None = None,
    keep_attention_params: float | None = None,
    kv_bytes_per_token: int | None = None,
    layers: int | None = None,
    fit: str | None = None,
    keep_decode_time: float | None = None,
    max_loss_increase: float | None = None,
    max_ppl_increase: float | None = None,
    config: PlanConfig | None = None,
    cache: CacheConfig | None = None,
    model: Any = None,
    tokenizer: Any = None,
    text: Any = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    progress: Progress = silent,
) -> Plan:
    """What every layer keeps so that a budget is kept to where the loss feels it least.

    ``profile`` is what `inspect` measured, or the folder of it. A budget is a share of the KV cache, of the parameters
    of the blocks, of the attention parameters or of the time to decode a token, bytes of the cache for each token,
    layers, or memory to fit into ("8GB at 32k x 4"); several hold at once. Instead of them, how much the measured loss
    (or perplexity) may rise: that builds and runs about six reduced versions of the ``model`` that was measured, on
    what the profile held out or on ``text``. Decode time is measured on ``model`` too, once. The plan prints as a
    table.

    >>> profile = hw.inspect(model, tokenizer, text=texts, config=hw.InspectConfig(tokens=256))
    >>> plan = hw.plan(profile, keep_kv=0.5, config=hw.PlanConfig(multiple_of=2))
    >>> plan.predicted["kept"] <= 0.5
    True
    """
    config, cache = config or PlanConfig(), cache or CacheConfig()
    amounts = BudgetConfig(
        keep_kv, keep_params, keep_attention_params, kv_bytes_per_token, layers, fit, keep_decode_time
    )
    bound = BoundConfig(max_loss_increase, max_ppl_increase)
    budget = read_budget(amounts, bound, cache)
    if budget is not None:
        return planned(profile, timed(budget, profile, model, opening, progress), config)
    return _searched(profile, bound, config, cache, model, tokenizer, text, reading, opening, progress)


def planned(profile: Profile | Path | str, budget: Budget, config: PlanConfig) -> Plan:
    """The plan for ``budget``; of a profile in a folder it says where that is."""
    if isinstance(profile, Profile):
        return plan_for(profile, budget, **options_of(config))
    return make_plan(Path(profile), None, budget, **options_of(config))[0]


def timed(
    budget: Budget,
    profile: Profile | Path | str,
    model: Any = None,
    opening: OpenConfig | None = None,
    progress: Progress = silent,
) -> Budget:
    """``budget`` with the decode time it limits, measured on ``model``, by default where the profile found it."""
    if not budget.timed:
        return budget
    from headwise.checkpoints.loaded import Loaded  # noqa: PLC0415 - the rest plans without torch
    from headwise.steps.timing import timing_of  # noqa: PLC0415

    measured = profile if isinstance(profile, Profile) else Profile.load(profile_file(Path(profile)))
    budget.check(measured.shape)
    source = model if model is not None else measured.model["source"]
    if not source:
        raise InputError("Decode time is measured: give the `model` that the profile is of.")
    loaded = Loaded.of(source, opening=opening)
    return budget.with_timing(timing_of(loaded, measured, budget, opening=opening, progress=progress))


def options_of(config: PlanConfig) -> dict[str, Any]:
    """The settings of a plan as the planner takes them."""
    protected = frozenset() if config.protect is None else read_layers(config.protect)
    return {
        "multiple": config.multiple_of,
        "protect": protected,
        "uniform": config.uniform,
        "merge": config.merge_heads,
        "absorb": config.absorb,
        "cache": config.cache,
    }


def _searched(
    profile: Profile | Path | str,
    bound: BoundConfig,
    config: PlanConfig,
    cache: CacheConfig,
    model: Any,
    tokenizer: Any,
    text: Any,
    reading: ReadConfig | None,
    opening: OpenConfig | None,
    progress: Progress,
) -> Plan:
    from headwise.checkpoints import profiled  # noqa: PLC0415 - the rest plans without torch
    from headwise.checkpoints.loaded import Loaded  # noqa: PLC0415
    from headwise.steps.search import search_plan  # noqa: PLC0415

    folder = None if isinstance(profile, Profile) else Path(profile)
    measured = profile if folder is None else profiled.Profile.load(folder)
    if not isinstance(measured, profiled.Profile):
        raise InputError("A bound on the loss needs a profile with its tensors: what inspect returns, or its folder.")
    source = model if model is not None else measured.model["source"]
    if not source:
        raise InputError("A bound on the loss is measured: give the `model` that the profile is of.")
    chosen = search_plan(
        Loaded.of(source, tokenizer, opening),
        measured,
        bound.nats or 0.0,
        text=text,
        reading=reading,
        opening=opening,
        context=cache.cache_tokens,
        dtype=cache.cache_dtype,
        progress=progress,
        **options_of(config),
    )
    return chosen if folder is None else replace(chosen, profile=str(folder.resolve()))
