"""Rates by which the decode time of any plan is predicted: from layers of many shapes, timed on this device.

A few plans at random from the menus of the model are carried out, with weights cut anyhow and codes of any levels: for
time only shapes count. Every block is timed while tokens are decoded, and the rates are fitted to that.
"""

from __future__ import annotations

import hashlib
import platform
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from headwise.checkpoints.loaded import Loaded
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.files.writing import cache_folder
from headwise.planning.menus import Menus
from headwise.records.budget import Budget
from headwise.records.plan import Changes, Plan, changed, in_order
from headwise.records.profile import Profile
from headwise.records.settings import OpenConfig
from headwise.records.shape import LayerShape, ModelShape
from headwise.records.timing import Timing, decode_work, work_key
from headwise.reduction.build import build_reduced
from headwise.reduction.levels import any_codes
from headwise.reduction.plans import menus_for
from headwise.runtime.cache import PackedCache
from headwise.tracing.placement import running
from headwise.tracing.speed import now

LAYERS = 120  # timed at least
SORTS = (None, "packed", None, "latent")  # of plans in turn; kernels are faster among their like
ABSORBED = ("absorbed", "absorbed")  # more of them, where positions were measured
WARM, COUNTED = 6, 9  # tokens: compilers see a growing cache for the first times
SEED = 0
METHOD = 3  # of measuring: what was measured by an earlier one is measured again


@dataclass(frozen=True, slots=True)
class Timed:
    """Median nanoseconds of each block, and of a token outside of them."""

    shape: ModelShape
    blocks: list[float]
    outside: float


def timing_of(
    loaded: Loaded,
    profile: Profile,
    budget: Budget,
    *,
    opening: OpenConfig | None = None,
    progress: Progress = silent,
) -> Timing:
    """The rates of the model that ``profile`` is of, after the tokens of ``budget``; measured here once, then known."""
    shape = profile.shape
    if shape_of(loaded.model).as_known_to(shape) != shape:
        raise InputError(f"{loaded.name} is no longer the model that the profile is of.")
    context, most = budget.tokens(shape), shape.max_tokens - WARM - COUNTED
    if shape.max_tokens:
        context = min(context, most)
    if context < 1:
        raise InputError(f"A model of {shape.max_tokens} tokens is too short for its decode time to be measured.")
    with running(loaded.model, loaded.opening(opening)) as model:
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
        dtype = str(model.dtype).removeprefix("torch.")
        facts = (METHOD, profile.fingerprint, device, platform.processor(), dtype, context, torch.get_num_threads())
        facts += (torch.__version__, model.config._attn_implementation, *(ABSORBED if _absorbs(profile) else ()))
        path = cache_folder() / "timings" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
        with suppress(InputError):
            return Timing.load(path)
        timing = measure_timing(model, profile, context, device=device, dtype=dtype, progress=progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        timing.save(path)
        return timing


def measure_timing(
    model: PreTrainedModel, profile: Profile, context: int, *, device: str, dtype: str, progress: Progress = silent
) -> Timing:
    """Rates fitted to the blocks of ``model`` as it is, and of plans for it at random."""
    shape = profile.shape
    chance = random.Random(SEED)
    count, absorbs = max(len(SORTS), -(-LAYERS // len(shape.layers))), _absorbs(profile)
    sorts = [*(SORTS[number % len(SORTS)] for number in range(count)), *(ABSORBED if absorbs else ())]
    plans = [random_plan(profile, context, chance, sort) for sort in sorts]
    measured = []
    for number, plan in enumerate((Plan.full(shape), *plans)):
        progress(number, 1 + len(plans), "timing layers")
        measured.append(time_layers(model, plan, context))
    return _fitted(measured, context, device, dtype)


def time_layers(model: PreTrainedModel, plan: Plan, context: int) -> Timed:
    """How long the blocks of ``model`` take after ``plan`` and so many tokens."""
    small, cache = reduced_with_cache(model, plan, context)
    token = torch.ones(1, 1, dtype=torch.long, device=small.device)
    totals = []
    with torch.inference_mode(), _watching(small) as seconds:
        for _ in range(WARM + COUNTED):
            start = now()
            cast(Any, small)(token, past_key_values=cache)
            totals.append(now() - start)
    blocks = [1e9 * statistics.median(each[WARM:]) for each in seconds]
    outside = [total - sum(each) for total, *each in zip(totals, *seconds, strict=True)]
    return Timed(shape_of(small), blocks, 1e9 * statistics.median(outside[WARM:]))


def reduced_with_cache(model: PreTrainedModel, plan: Plan, context: int) -> tuple[PreTrainedModel, Any]:
    """``model`` after ``plan``, with weights cut anyhow, and its cache of so many random tokens."""
    small = build_reduced(model, plan, tensors={}, method="svd", share=True).eval()
    codes = any_codes(small, plan)
    cache = DynamicCache(config=small.config) if codes is None else PackedCache(small, codes)
    with torch.inference_mode():
        _fill(small, cache, context)
    return small, cache


def random_plan(profile: Profile, context: int, chance: random.Random, sort: str | None = None) -> Plan:
    """A plan at random: with caches of one ``sort`` where there are such, or about as many layers of each sort."""
    every = Budget("keep_kv", 1.0, context, also=(Budget("keep_attention_params", 1.0),))  # of two, menus stay whole
    absorb, shape, first = sort in ABSORBED, profile.shape, chance.randrange(12)
    menus = menus_for(profile, every, cache="none" if absorb else "latent", absorb=absorb)
    layers = [_changes(menus, layer, number, first + number, sort, chance) for number, layer in enumerate(shape.layers)]
    return Plan.make(shape, layers)


def _changes(
    menus: Menus, layer: LayerShape, number: int, turn: int, sort: str | None, chance: random.Random
) -> Changes:
    """Changes at random of one layer, whose cache is of such a ``sort``, or of the one whose ``turn`` it is."""
    parts = [menu for (which, _), menu in menus.items() if which == number]
    sorts: dict[str, list[Changes]] = {}
    for _ in range(len(max(parts, key=len))):
        options = [chance.choice(menu) for menu in parts]
        changes = in_order(change for option in options for change in option.changes())
        after = changed(layer, changes)
        if after is not None:
            sorts.setdefault(_sort(after), []).append(changes)
    names = sorted(sorts)
    return chance.choice(sorts[sort if sort in sorts else names[turn % len(names)]])


def _absorbs(profile: Profile) -> bool:
    """Whether plans may hold latents that are read as they are."""
    return any("positions_free" in layer.values for layer in profile.layers)


def _sort(layer: LayerShape) -> str:
    if layer.absorbed:
        return "absorbed"
    if layer.packed is None:
        return "dense" if layer.heads else "without"
    return "latent" if layer.packed.rebuilding else "packed"


def _fill(model: PreTrainedModel, cache: Any, tokens: int) -> None:
    """Give ``cache`` random keys and values."""
    layers = zip(sites_of(model), shape_of(model).layers, strict=True)
    for site, layer in layers:
        if not layer.heads:
            continue
        number = int(site.module.layer_idx)
        heads, widths = layer.kv_heads, (layer.qk_dim, layer.v_dim)
        if layer.absorbed:
            heads, widths = heads // layer.absorbed.joined, (layer.absorbed.rank, 2 * layer.absorbed.pairs)
        sizes = ((1, heads, tokens, width) for width in widths)
        cache.update(*(torch.randn(size, device=model.device, dtype=model.dtype) for size in sizes), number)
        if layer.packed is not None:
            cache.layers[number].store(None, None)


@contextmanager
def _watching(model: PreTrainedModel) -> Iterator[list[list[float]]]:
    """In the block the seconds of each block of ``model`` are put down at every forward pass."""
    sites = sites_of(model)
    seconds: list[list[float]] = [[] for _ in sites]
    starts = [0.0] * len(sites)

    def begin(number: int) -> None:
        starts[number] = now()

    def end(number: int) -> None:
        seconds[number].append(now() - starts[number])

    with ExitStack() as hooks:
        for number, site in enumerate(sites):
            before = site.block.register_forward_pre_hook(lambda *_, number=number: begin(number))
            after = site.block.register_forward_hook(lambda *_, number=number: end(number))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield seconds


def _fitted(measured: list[Timed], context: int, device: str, dtype: str) -> Timing:
    """Rates that bring `decode_work` nearest to the blocks ``measured``, in shares of their time, none below zero."""
    rows = []
    for each in measured:
        for layer, nanoseconds in zip(each.shape.layers, each.blocks, strict=True):
            work = decode_work(layer, each.shape, context)
            rows.append((work | {"weights": work["weights"] + layer.rest_matmul}, nanoseconds))
    names = sorted({name for work, _ in rows for name in work})
    times = np.array([nanoseconds for _, nanoseconds in rows])
    amounts = np.array([[work.get(name, 0.0) for name in names] for work, _ in rows]) / times[:, None]
    rates = dict(zip(names, nonnegative(amounts).tolist(), strict=True))
    error = float(np.abs(amounts @ np.array([rates[name] for name in names]) - 1).mean())
    outside = max(0.0, statistics.median(each.outside for each in measured))
    return Timing(device, dtype, context, outside, rates, _whole(measured[0], context, rates["weights"]), error)


def _whole(dense: Timed, context: int, rate: float) -> dict[str, float]:
    """Median nanoseconds of layers with the same attention, without the rest of their blocks."""
    alike: dict[str, list[float]] = {}
    for layer, nanoseconds in zip(dense.shape.layers, dense.blocks, strict=True):
        key = work_key(decode_work(layer, dense.shape, context))
        alike.setdefault(key, []).append(nanoseconds - rate * layer.rest_matmul)
    return {key: statistics.median(times) for key, times in alike.items()}


def nonnegative(amounts: np.ndarray) -> np.ndarray:
    """Rates, none below zero, that bring every row of ``amounts`` near 1; what would be below leaves, worst first."""
    scale = np.maximum(amounts.max(axis=0), 1e-300)
    kept = list(range(amounts.shape[1]))
    while True:
        fitted, *_ = np.linalg.lstsq(amounts[:, kept] / scale[kept], np.ones(len(amounts)), rcond=None)
        if not kept or fitted.min() >= 0:
            break
        del kept[int(fitted.argmin())]
    rates = np.zeros(amounts.shape[1])
    rates[kept] = fitted / scale[kept]
    return rates
