"""Bytes of stored prefixes, and the time to load one against computing it anew, by kind of cache.

    python benchmarks/prefixes.py MODEL --calibration FILE --text FILE [--tokens 1000] [--work FOLDER]
                                  [-o results/prefixes.json]

MODEL is a folder, or "smollm2" for the one of the demo. A prefix is what `PackedCache.save` writes after the first
``--tokens`` tokens of the text; of the dense model, its keys and values in bfloat16 as safetensors. Bytes are those of
the file, header and all. What levels coordinates are rounded to changes neither bytes nor time, so none are fitted
here: bits are those of the plan for the asked share of the bytes at so many tokens. Everything runs in float32 on two
threads; times are medians of three. A loaded prefix must give the next token the logits that the saved one gives.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from bits import commit
from coordinates import profile_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.files.errors import InputError
from headwise.files.writing import replacing
from headwise.records.budget import Budget
from headwise.reduction.levels import any_codes
from headwise.reduction.plans import plan_for
from headwise.runtime.cache import PackedCache
from headwise.steps.demo import demo_model

KINDS = (("mixed", 0.25), ("mixed", 0.125), ("latent", 0.25), ("latent", 0.125))
REPEATS, THREADS = 3, 2


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times[1:]), 4)


def save_dense(cache: DynamicCache, path: Path) -> None:
    """The keys and values of a cache in bfloat16."""
    parts = ((i, name, getattr(layer, name)) for i, layer in enumerate(cache.layers) for name in ("keys", "values"))
    save_file({f"{i}.{name}": part.bfloat16().contiguous() for i, name, part in parts}, path)


def load_dense(model: PreTrainedModel, path: Path) -> DynamicCache:
    """A cache with the keys and values in a file."""
    cache, tensors = DynamicCache(config=model.config), load_file(path)
    for i in range(len(cache.layers)):
        cache.update(*(tensors[f"{i}.{name}"].to(model.dtype) for name in ("keys", "values")), i)
    return cache


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    ids_1T: Tensor,
    empty: Callable[[], Any],
    save: Callable[[Any, Path], None],
    load: Callable[[Path], Any],
) -> dict[str, float]:
    """Bytes of the file that holds all tokens but the last, and seconds to compute, to save and to load it."""
    prefix, last = ids_1T[:, :-1], ids_1T[:, -1:]

    def computed() -> Any:
        cache = empty()
        model(prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder) / "prefix.safetensors", computed()
        save(cache, path)
        times = {"save_seconds": seconds(lambda: save(cache, path)), "load_seconds": seconds(lambda: load(path))}
        size, loaded = path.stat().st_size, load(path)
    times["prefill_seconds"] = seconds(computed)
    kept, read = (model(last, past_key_values=each).logits for each in (cache, loaded))
    difference = (kept - read).abs().max().item()
    return {"bytes": size, "bytes_per_1000_tokens": round(1000 * size / prefix.shape[1]), **times, "apart": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="whose beginning is the prefix")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--work", type=Path, help="folder that keeps what was measured of a model for other runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/prefixes.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    source = str(demo_model()) if args.model == "smollm2" else args.model
    ids = open_tokenizer(source)(args.text.read_text(encoding="utf-8"))["input_ids"][: args.tokens + 1]
    if len(ids) <= args.tokens:
        raise InputError(f"{args.text} has {len(ids)} tokens, {args.tokens + 1} are needed.")
    ids_1T, model = torch.tensor([ids]), open_model(source).float()

    def empty() -> DynamicCache:
        return DynamicCache(config=model.config)

    rows = [{"cache": "dense", **measure(model, ids_1T, empty, save_dense, lambda path: load_dense(model, path))}]
    print(json.dumps(rows[-1]), flush=True)
    profile = profile_of(source, args.calibration, False, args.work)
    for kind, share in KINDS:
        plan = plan_for(profile, Budget("keep_kv", share, args.tokens), cache=kind)
        codes = any_codes(model, plan)
        if codes is None:
            raise RuntimeError("The plan does not round the cache.")
        packed = measure(
            model,
            ids_1T,
            lambda codes=codes: PackedCache(model, codes),
            lambda cache, path: cache.save(path),
            lambda path, codes=codes: PackedCache.load(path, model, codes),
        )
        rows.append({"cache": kind, "share": share, **packed})
        print(json.dumps(rows[-1]), flush=True)
    facts = {
        "model": Path(source).name,
        "tokens": args.tokens,
        "threads": THREADS,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }
    with replacing(args.output) as temporary:
        temporary.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
