"""Which way of running unequal query/key and value widths is fastest? Decides `ReducedAttention._attend`.

    python benchmarks/attention_widths.py [-o results/attention_widths.json]

Times sdpa as it is, sdpa padded to one width, and plain grouped matrix products, interleaved in one run; reports each
as a ratio to sdpa on 64/64 (below 1: faster). 9 query heads on 3 key/value heads, as in SmolLM2-135M, float32.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headwise.runtime.modeling_headwise import grouped_attention, padded_attention

HEADS, KV_HEADS, REPEATS = 9, 3, 9
WIDTHS = [(64, 64), (64, 32), (32, 64), (48, 40)]
CASES = {"prefill 1024": (1024, 1024), "decode at 1024": (1, 1024), "decode at 8192": (1, 8192)}
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=False)


def ways(queries, keys, qk_dim, v_dim):
    """Name and call of each way on the same random tensors."""
    q = torch.randn(1, HEADS, queries, qk_dim)
    k, v = torch.randn(1, KV_HEADS, keys, qk_dim), torch.randn(1, KV_HEADS, keys, v_dim)
    mask = None if queries == 1 else torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    calls = {"sdpa": lambda: sdpa_attention_forward(MODULE, q, k, v, None, scaling=0.125)}
    calls["grouped"] = lambda: grouped_attention(MODULE, q, k, v, mask, scaling=0.125)
    if qk_dim != v_dim:
        calls["padded"] = lambda: padded_attention(sdpa_attention_forward, MODULE, q, k, v, None, scaling=0.125)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("results/attention_widths.json"))
    output = parser.parse_args().output
    torch.manual_seed(0)
    rows = []
    for case, (queries, keys) in CASES.items():
        calls = {(w, name): call for w in WIDTHS for name, call in ways(queries, keys, *w).items()}
        times = {key: [] for key in calls}
        with torch.inference_mode():
            for _ in range(REPEATS):
                for key, call in calls.items():
                    call()
                    start = time.perf_counter()
                    for _ in range(1 if queries > 1 else 20):
                        call()
                    times[key].append(time.perf_counter() - start)
        base = statistics.median(times[(64, 64), "sdpa"])
        for ((qk_dim, v_dim), name), measured in times.items():
            ratio = round(statistics.median(measured) / base, 2)
            rows.append({"case": case, "qk_dim": qk_dim, "v_dim": v_dim, "way": name, "ratio": ratio})
            print(f"{case:16} {qk_dim:3}/{v_dim:<3} {name:8} {ratio:6.2f} x sdpa 64/64")
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(), "seed": 0}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
