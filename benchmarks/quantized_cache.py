"""transformers' QuantizedCache: its rounding among the rows of bits.py; how long a token takes with it, and with ours.

    pip install hqq optimum-quanto
    python benchmarks/quantized_cache.py loss MODEL --text FILE ...       (as bits.py, and to the same table)
    python benchmarks/quantized_cache.py decode MODEL [--lengths 1024,8192] [--caches dynamic,static,headwise,...]
                                                [--dtype fp32] [--new 8] [-o results/quantized_cache.json]
    python benchmarks/quantized_cache.py memory MODEL [--lengths 8192] [-o results/quantized_cache.json]

MODEL is a folder, or "smollm2" for the model of the demo; for "headwise" and for memory one that headwise compress gave
a packed cache. Memory: the most that is resident while 8 tokens are decoded from a packed cache, above what was before
there was a cache, against its bytes (Linux).

Both backends, 4 and 2 bits, 64 numbers a scale, along axis 0 as by default; hqq along axis 1 too, which the
documentation of transformers recommends. Losses: each window is quantised and read back as a whole, the way the cache
treats a prompt; scales count 16 bits each, as in a model of 16 bits. Decoding: float32, batch 1, all caches in turns in
one process, medians over tokens; ratios are to DynamicCache. Every ``residual_length`` tokens such a cache quantises
all it holds anew: "milliseconds" is a token in between, "requantising" that work spread over those tokens (timed once,
while the cache is filled), and the second ratio counts both. The caches are filled with random numbers; only how soon
hqq stops improving its scales may depend on them. On Linux, decode with MALLOC_MMAP_THRESHOLD_=4294967296 and
MALLOC_TRIM_THRESHOLD_=17179869184 in the environment: otherwise the C library may give large temporaries back to the
system at every step, and times differ from run to run by a factor of two and more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from alternatives import GROUP, SEED, Alternative, Rounded, code_bytes
from bits import Table, arguments, commit, measure, uncalibrated
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer

import headwise as hw
from headwise.checkpoints.load import open_model
from headwise.families.shapes import shape_of
from headwise.steps.demo import demo_model

LAYERS = {"hqq": HQQQuantizedLayer, "quanto": QuantoQuantizedLayer}
WAYS = {
    **{f"{backend}-{bits}": (backend, bits, 0) for backend in LAYERS for bits in (4, 2)},
    **{f"hqq-{bits}-axis-1": ("hqq", bits, 1) for bits in (4, 2)},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM = 3  # tokens that are not counted: compilers see a growing cache for the first times
ROOM = 64  # tokens for which a static cache has room
PIECE = 1024  # tokens that a packed cache is given at once
COMPILED_FROM = 8192
States = list[tuple[Tensor, Tensor]]  # keys and values of each layer


def stored(x_BGTK: Tensor, layer: QuantizedLayer, axis: int) -> Rounded:
    """What such a layer reads back of each window, quantised at once."""
    parts = []
    for x_1GTK in x_BGTK.split(1):
        if not layer.is_initialized:
            layer.lazy_initialization(x_1GTK, x_1GTK)
        parts.append(layer._dequantize(layer._quantize(x_1GTK.contiguous(), axis=axis)))
    numbers = x_BGTK.numel()
    return Rounded(torch.cat(parts), code_bytes(numbers, layer.nbits) + 4 * (numbers // GROUP))


def alternative(backend: str, bits: int, axis: int) -> Callable[[PreTrainedModel], Alternative]:
    """From a model to the quantiser of a backend."""

    def of(model: PreTrainedModel) -> Alternative:
        layer = LAYERS[backend](nbits=bits, q_group_size=GROUP)

        def both(x_BGTK: Tensor) -> Rounded:
            return stored(x_BGTK, layer, axis)

        return Alternative(model, bits, both, both)

    return of


METHODS = {name: uncalibrated(alternative(*way)) for name, way in WAYS.items()}


def random_states(model: PreTrainedModel, length: int) -> States:
    """Keys and values of so many tokens for each layer."""
    return [
        tuple(torch.randn(1, layer.kv_heads, length, n).to(model.dtype) for n in (layer.qk_dim, layer.v_dim))
        for layer in shape_of(model).layers
    ]


def filled(cache: Cache, states: States) -> Cache:
    """``cache`` after a prompt with these keys and values."""
    for number, (k_1GTK, v_1GTV) in enumerate(states):
        cache.update(k_1GTK, v_1GTV, number)
    return cache


def quantized(backend: str, bits: int, axis: int) -> Callable[[PreTrainedModel, States], Cache]:
    """From a model and what its cache shall hold to that cache."""

    def of(model: PreTrainedModel, states: States) -> Cache:
        settings = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": GROUP}
        return filled(QuantizedCache(backend, model.config, **settings), states)

    return of


def static(model: PreTrainedModel, states: States) -> Cache:
    """A cache with room for what is there and some more tokens, which it never copies."""
    length = states[0][0].shape[2]
    return filled(StaticCache(config=model.config, max_cache_len=length + ROOM), states)


def packed(model: PreTrainedModel, states: States) -> Cache:
    """headwise's cache, as the folder of the model says."""
    cache = filled(hw.cache(model), states)
    for layer in cache.layers:
        layer.store(None, None)  # what attention asks for in a real forward pass
    return cache


# A cache is one more entry: from a model and keys and values of a prompt to a cache that holds them. The first is 1.
CACHES: dict[str, Callable[[PreTrainedModel, States], Cache]] = {
    "dynamic": lambda model, states: filled(DynamicCache(config=model.config), states),
    "static": static,
    "headwise": packed,
    **{name: quantized(*way) for name, way in WAYS.items()},
}


def requantising(cache: Cache, seconds: float) -> float:
    """Seconds a token where quantising all of ``cache`` takes ``seconds``."""
    return seconds / cache.layers[0].residual_length if isinstance(cache, QuantizedCache) else 0.0


@torch.inference_mode()
def decode_seconds(
    model: PreTrainedModel, names: Sequence[str], length: int, new: int
) -> dict[str, tuple[float, float]]:
    """Each cache after ``length`` tokens: median seconds of one more, and those of quantising anew for each token."""
    states = random_states(model, length)
    caches, anew = {}, {}
    for name in names:
        start = time.perf_counter()
        caches[name] = CACHES[name](model, states)
        anew[name] = requantising(caches[name], time.perf_counter() - start)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.ones(1, 1, dtype=torch.long)
    for _ in range(WARM + new):
        for name, cache in caches.items():
            start = time.perf_counter()
            model(token, past_key_values=cache)
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(measured[WARM:]), anew[name]) for name, measured in seconds.items()}


def opened(args: argparse.Namespace) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what a row says of it."""
    source = str(demo_model()) if args.model == "smollm2" else args.model
    model = open_model(source).to(DTYPES[args.dtype])
    return model, {"model": Path(source).name, "dtype": args.dtype, "threads": torch.get_num_threads()}


def resident(which: str) -> int:
    """Bytes of this process in memory: now ("VmRSS"), or the most since `forget_peak` ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


def give_back() -> None:
    """Let the C library give all memory that is free back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def forget_peak() -> None:
    """Let the most memory be what it is now."""
    Path("/proc/self/clear_refs").write_text("5")


@torch.inference_mode()
def memory(args: argparse.Namespace) -> None:
    """What is resident while tokens are decoded from a packed cache, above the model and against the cache's bytes."""
    model, facts = opened(args)
    for length in map(int, args.lengths.split(",")):
        token = torch.ones(1, 1, dtype=torch.long)
        small = packed(model, random_states(model, COMPILED_FROM))
        for _ in range(WARM):
            model(token, past_key_values=small)  # compiles, and loads what the first tokens of a process load
        del small
        give_back()
        before = resident("VmRSS")
        cache = hw.cache(model)
        for _ in range(length // PIECE):
            for number, layer in enumerate(shape_of(model).layers):
                sizes = ((layer.kv_heads, PIECE, n) for n in (layer.qk_dim, layer.v_dim))
                cache.update(*(torch.randn(1, *size).to(model.dtype) for size in sizes), number)
                cache.layers[number].store(None, None)
        give_back()
        forget_peak()
        filled_bytes = resident("VmRSS") - before
        for _ in range(args.new):
            model(token, past_key_values=cache)
        above = resident("VmHWM") - before
        row = {
            "cache_bytes": cache.nbytes,
            "resident": filled_bytes,
            "peak": above,
            "ratio": round(above / cache.nbytes, 3),
        }
        Table(args.output).add({**facts, "length": length, "memory": True, **row, "commit": commit()})
        del cache


def decode(args: argparse.Namespace) -> None:
    """Rows of all lengths that the table does not have."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    model, facts = opened(args)
    table, version, names = Table(args.output), commit(), args.caches.split(",")
    for length in map(int, args.lengths.split(",")):
        run = {**facts, "length": length, "new": args.new}
        if all(table.has(**run, cache=name) for name in names):
            continue
        times = decode_seconds(model, names, length, args.new)
        dense, _ = times[names[0]]
        for name, (seconds, anew) in times.items():
            row = {
                "cache": name,
                "milliseconds": round(1000 * seconds, 1),
                "requantising": round(1000 * anew, 1),
                "ratio": round(seconds / dense, 2),
                "ratio_with_requantising": round((seconds + anew) / dense, 2),
            }
            table.add({**run, **row, "commit": version})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    loss = commands.add_parser("loss", parents=[arguments(METHODS)])
    loss.set_defaults(run=lambda args: measure(args, METHODS))
    times = commands.add_parser("decode")
    times.add_argument(
        "--caches", default=",".join(CACHES), help="which to time, the first is 1 (default: %(default)s)"
    )
    times.set_defaults(run=decode)
    room = commands.add_parser("memory")
    room.set_defaults(run=memory)
    for each in (times, room):
        each.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
        each.add_argument("--lengths", default="1024,8192", help="tokens in the cache, one or several")
        each.add_argument("--new", type=int, default=8, help="tokens to decode, after some that are not counted")
        each.add_argument("--dtype", choices=DTYPES, default="fp32")
        each.add_argument("-o", "--output", type=Path, default=Path("results/quantized_cache.json"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
