"""Do reduced models run as fast as their shapes promise? Prefill and decode of SmolLM2 students against stock.

    python benchmarks/student_speed.py [-o results/student_speed.json]

Interleaved A/B runs in one process, float32, sdpa; each number is the median over repeats of time / stock time (below
1: faster), with the quartiles. Quality plays no role here: the students are cut by their weights alone.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from headwise.checkpoints.load import open_model
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan, cost_of
from headwise.reduction.build import build_reduced
from headwise.steps.demo import demo_model

REPEATS = 7
PREFILL = 1024
CONTEXTS = (1024, 4096, 8192)
STEPS = 4
WIDTHS = {
    "full": (64, 64),
    "48/48": (48, 48),
    "32/32": (32, 32),
}
PLANNED = {"planned 75 %": "plan_smollm2_75.json", "planned 50 %": "plan_smollm2_50.json"}  # by benchmarks/plans.py


def prefill(model, ids):
    """Seconds to read a prompt."""
    start = time.perf_counter()
    model(ids[:, :PREFILL], use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def filled_cache(model, context):
    """A cache as if ``context`` tokens had passed: random numbers cost as much as real ones."""
    cache = DynamicCache(config=model.config)
    for layer, shape in zip(cache.layers, shape_of(model).layers, strict=True):
        sizes = ((1, shape.kv_heads, context, width) for width in (shape.qk_dim, shape.v_dim))
        layer.update(*(torch.randn(size) for size in sizes))
    return cache


def decode(model, cache, ids):
    """Seconds for one new token, mean of a few."""
    start = time.perf_counter()
    for step in range(STEPS):
        model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - start) / STEPS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("results/student_speed.json"))
    output = parser.parse_args().output
    torch.manual_seed(0)
    stock = open_model(str(demo_model()))
    shape = shape_of(stock)
    models = {"stock": stock}
    for name, (qk_dim, v_dim) in WIDTHS.items():
        layers = tuple(LayerPlan(layer.heads, layer.kv_heads, qk_dim, v_dim) for layer in shape.layers)
        models[name] = build_reduced(stock, Plan.make(shape, layers), form="per-layer")
    for name, file in PLANNED.items():
        models[name] = build_reduced(stock, Plan.load(output.parent / file), form="per-layer")
    ids = torch.randint(100, 40000, (1, PREFILL))
    rows = []
    cases = {f"prefill {PREFILL}": None, **{f"decode at {context}": context for context in CONTEXTS}}
    with torch.inference_mode():
        for case, context in cases.items():
            times = {name: [] for name in models}
            for repeat in range(REPEATS + 1):
                for name, model in models.items():
                    measured = (
                        prefill(model, ids) if context is None else decode(model, filled_cache(model, context), ids)
                    )
                    if repeat:  # the first round warms up
                        times[name].append(measured)
            for name, model in models.items():
                ratios = sorted(mine / theirs for mine, theirs in zip(times[name], times["stock"], strict=True))
                low, median, high = statistics.quantiles(ratios, n=4)
                cache = cost_of(shape_of(model), 1).kv_bytes / cost_of(shape, 1).kv_bytes
                row = {"case": case, "model": name, "cache": round(cache, 3), "ratio": round(median, 3)}
                rows.append({**row, "quartiles": [round(low, 3), round(high, 3)]})
                print(f"{case:16} {name:12} cache {cache:.2f}  time {median:.2f} ({low:.2f} to {high:.2f}) x stock")
    facts = {"model": "SmolLM2-135M-Instruct", "torch": torch.__version__, "threads": torch.get_num_threads()}
    facts |= {"machine": platform.machine(), "seed": 0, "repeats": REPEATS, "attention": "sdpa", "dtype": "float32"}
    output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
