"""Cache bytes of a real generation, and tokens per second of prefill and decode, models measured in turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.records.packing import RECENT
from headwise.records.scores import Rate, Speed
from headwise.runtime.cache import CacheSpec, PackedCache
from headwise.runtime.reopen import cache_bytes
from headwise.tracing.example import example_inputs
from headwise.tracing.forward import placed_inputs

ROUNDS = 5
PIECE = 1024  # tokens a prompt is read in at once: attention without a fused kernel takes memory for every pair
STEPS = 8  # tokens decoded in one measurement
PROMPT, WRITTEN = 8, 8
Job = Callable[[], object]


def cache_per_token(model: PreTrainedModel, codes: CacheSpec | None = None) -> float:
    """Bytes in the cache that ``generate`` leaves behind, for each token of each sequence in it.

    Of a packed cache (``codes``) what each token adds: the levels of its coordinates and first tokens are there once.
    """
    if codes is not None:
        return _growth(model, codes)
    ids = example_inputs(model, PROMPT)["input_ids"]
    with torch.inference_mode():
        generated = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=WRITTEN,
            do_sample=False,
            eos_token_id=None,
            cache_implementation="dynamic",
            return_dict_in_generate=True,
        )
    rows, tokens = generated.sequences.shape
    return cache_bytes(generated.past_key_values) / (rows * (tokens - 1))  # the last token has not been read yet


def _growth(model: PreTrainedModel, codes: CacheSpec) -> float:
    """Bytes that one more token of one sequence adds to a packed cache, by a real one, which packs several at once."""
    ids = example_inputs(model, RECENT)["input_ids"]
    before = model.config._attn_implementation or "sdpa"
    cache, sizes = PackedCache(model, codes), []
    try:
        with torch.inference_mode():
            for piece in (ids, ids):
                cast(Any, model)(piece, past_key_values=cache, use_cache=True)
                sizes.append(cache.nbytes)
    finally:
        model.set_attn_implementation(before)
    return (sizes[1] - sizes[0]) / ids.numel()


def decoder_speed(
    models: Sequence[PreTrainedModel],
    context: int,
    progress: Callable[[int], None],
    codes: Sequence[CacheSpec | None] = (),
) -> list[Speed]:
    """Prefill speed of each model over ``context`` tokens, and decode speed of the last few of them.

    Models with ``codes`` fill and read packed caches.
    """
    with ExitStack() as afterwards, torch.inference_mode():
        codes = codes or [None] * len(models)
        for model, packed in zip(models, codes, strict=True):
            if packed is not None:
                afterwards.callback(model.set_attn_implementation, model.config._attn_implementation or "sdpa")
        prompts = [_prompt(model, context) for model in models]
        filling = list(zip(models, prompts, codes, strict=True))
        caches = [read(model, ids[:, :-STEPS], packed) for model, ids, packed in filling]
        decoding = [partial(step, *arguments) for arguments in zip(models, caches, prompts, strict=True)]
        for job in decoding:
            job()
        decode_seconds = in_turns(decoding, progress)
        prefill_seconds = in_turns([partial(read, *arguments) for arguments in filling], progress)
    decode = [Rate.of(STEPS, seconds, decode_seconds[0]) for seconds in decode_seconds]
    return [
        Speed(context, Rate.of(context, seconds, prefill_seconds[0]), rate)
        for seconds, rate in zip(prefill_seconds, decode, strict=True)
    ]


def encoder_speed(
    models: Sequence[PreTrainedModel],
    inputs: Sequence[dict[str, Tensor]],
    tokens: int,
    context: int,
    progress: Callable[[int], None],
) -> list[Speed]:
    """Speed of each model on its own ``inputs``, which hold ``tokens`` in sequences of ``context``."""
    jobs = [partial(_forward, *arguments) for arguments in zip(models, inputs, strict=True)]
    with torch.inference_mode():
        for job in jobs:
            job()
        taken = in_turns(jobs, progress)
    return [Speed(context, Rate.of(tokens, seconds, taken[0])) for seconds in taken]


def in_turns(jobs: Sequence[Job], progress: Callable[[int], None] = lambda round: None) -> list[list[float]]:
    """Seconds each job takes in each round. Jobs alternate, so that what else the machine does slows all of them."""
    seconds: list[list[float]] = [[] for _ in jobs]
    for number in range(ROUNDS):
        progress(number)
        for index in order(len(jobs), number):
            start = now()
            jobs[index]()
            seconds[index].append(now() - start)
    return seconds


def order(count: int, number: int) -> Iterator[int]:
    """The order of ``count`` jobs in a round: forwards, then backwards, and so on."""
    return iter(range(count)) if number % 2 == 0 else reversed(range(count))


def read(model: PreTrainedModel, ids: Tensor, codes: CacheSpec | None = None) -> Any:
    """Prefill: the cache of ``model``, packed by ``codes`` if there are any, after a prompt."""
    cache: Any = None if codes is None else PackedCache(model, codes)
    for piece in ids.split(PIECE, dim=1):
        output = cast(Any, model)(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    return cache


def step(model: PreTrainedModel, cache: Any, ids: Tensor) -> None:
    """Decode the last few of ``ids`` one by one after the ``cache`` of all others, which stays as it is.

    Dynamic caches never write into a tensor they hold, so a copy of their layers shares it for nothing; they cannot
    all be cropped (sliding windows), and the call for it has changed between versions of transformers. A packed one
    writes into its blocks, and forgets what it wrote.
    """
    if isinstance(cache, PackedCache):
        for token in ids[:, -STEPS:].split(1, dim=1):
            cast(Any, model)(token, past_key_values=cache, use_cache=True)
        cache.crop(-STEPS)
        return
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    for token in ids[:, -STEPS:].split(1, dim=1):
        cast(Any, model)(token, past_key_values=own, use_cache=True)


def _prompt(model: PreTrainedModel, context: int) -> Tensor:
    return example_inputs(model, context)["input_ids"][:1]


def _forward(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    cast(Any, model)(**placed_inputs(model, inputs))


def now() -> float:
    """Seconds on a clock, when all that was asked of a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
