"""transformers' QuantizedCache: its rounding among the rows of bits.py, and how long a token takes to decode with it.

    pip install hqq optimum-quanto
    python benchmarks/quantized_cache.py loss MODEL --text FILE ...       (as bits.py, and to the same table)
    python benchmarks/quantized_cache.py decode MODEL [--lengths 1024,8192] [--new 8] [-o results/quantized_cache.json]

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
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from alternatives import GROUP, SEED, Alternative, Rounded, code_bytes
from bits import Table, arguments, commit, measure, uncalibrated
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import HQQQuantizedLayer, QuantizedLayer, QuantoQuantizedLayer

from headwise.checkpoints.load import open_model
from headwise.families.shapes import shape_of
from headwise.steps.demo import demo_model

LAYERS = {"hqq": HQQQuantizedLayer, "quanto": QuantoQuantizedLayer}
WAYS = {
    **{f"{backend}-{bits}": (backend, bits, 0) for backend in LAYERS for bits in (4, 2)},
    **{f"hqq-{bits}-axis-1": ("hqq", bits, 1) for bits in (4, 2)},
}
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
        (torch.randn(1, layer.kv_heads, length, layer.qk_dim), torch.randn(1, layer.kv_heads, length, layer.v_dim))
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


# A cache is one more entry: from a model and keys and values of a prompt to a cache that holds them. The first is 1.
CACHES: dict[str, Callable[[PreTrainedModel, States], Cache]] = {
    "dynamic": lambda model, states: filled(DynamicCache(config=model.config), states),
    **{name: quantized(*way) for name, way in WAYS.items()},
}


def requantising(cache: Cache, seconds: float) -> float:
    """Seconds a token where quantising all of ``cache`` takes ``seconds``."""
    return seconds / cache.layers[0].residual_length if isinstance(cache, QuantizedCache) else 0.0


@torch.inference_mode()
def decode_seconds(model: PreTrainedModel, length: int, new: int) -> dict[str, tuple[float, float]]:
    """Each cache after ``length`` tokens: median seconds of one more, and those of quantising anew for each token."""
    states = random_states(model, length)
    caches, anew = {}, {}
    for name, make in CACHES.items():
        start = time.perf_counter()
        caches[name] = make(model, states)
        anew[name] = requantising(caches[name], time.perf_counter() - start)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.ones(1, 1, dtype=torch.long)
    for _ in range(1 + new):
        for name, cache in caches.items():
            start = time.perf_counter()
            model(token, past_key_values=cache)
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(measured[1:]), anew[name]) for name, measured in seconds.items()}


def decode(args: argparse.Namespace) -> None:
    """Rows of all lengths that the table does not have."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    source = str(demo_model()) if args.model == "smollm2" else args.model
    model = open_model(source).float()
    table, version = Table(args.output), commit()
    for length in map(int, args.lengths.split(",")):
        run = {"model": Path(source).name, "length": length, "new": args.new, "threads": torch.get_num_threads()}
        if all(table.has(**run, cache=name) for name in CACHES):
            continue
        times = decode_seconds(model, length, args.new)
        dense, _ = times["dynamic"]
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
    times.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
    times.add_argument("--lengths", default="1024,8192", help="tokens in the cache, one or several")
    times.add_argument("--new", type=int, default=8, help="tokens to decode, after one that is not counted")
    times.add_argument("-o", "--output", type=Path, default=Path("results/quantized_cache.json"))
    times.set_defaults(run=decode)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
