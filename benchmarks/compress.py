"""Perplexity of SmolLM2-135M cut to the same KV bytes in different ways, unhealed, real students on real text.

    python benchmarks/compress.py --calibration FILE --text FILE [--tokens 20480] [--context 512] [-o FILE]

Rows: by the weights alone (truncated SVD, RoPE pairs by norm), uniform widths; along measured directions, uniform
widths; along measured directions, widths planned from the profile (multiples of 8). Excess: nats over the dense model.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from headwise.families.load import open_model
from headwise.families.measured import kept_directions
from headwise.families.student import build_student
from headwise.records import LayerPlan, Plan
from headwise.steps.demo import demo_model
from headwise.steps.inspect import inspect
from headwise.steps.plan import make_plan

SHARES = (0.875, 0.75, 0.5)
SVD_SHARE = 0.75  # one is enough: the weights alone lose the model
CALIBRATION_TOKENS = 8192


def loss(model, windows):
    """Mean negative log-likelihood of all tokens of the windows but the first of each."""
    total = 0.0
    with torch.inference_mode():
        for rows in windows.split(2):
            logits = model(rows, use_cache=False).logits[:, :-1]
            total += cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def uniform(profile, share):
    """The same widths in every layer; the pairs each key/value head feels most."""
    width = round(64 * share)
    layers = []
    for measured in profile.layers:
        felt = torch.tensor(measured.values["qk_unit_damage"])
        pairs = felt.topk(width // 2, dim=-1).indices.sort(dim=-1).values.tolist()
        layers.append(LayerPlan(9, 3, width, width, rope_pairs=tuple(map(tuple, pairs))))
    return Plan.make(profile.shape, tuple(layers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/compress.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model())
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, : args.tokens]
    windows = ids[: len(ids) // args.context * args.context].view(-1, args.context)
    model = open_model(source)
    rows = []

    def measure(name, share, student, **facts):
        start = time.perf_counter()
        found = loss(student, windows)
        row = {"method": name, "kv_share": share, "perplexity": round(math.exp(found), 3), **facts}
        row["excess_nats"] = round(found - dense, 4) if rows else 0.0
        rows.append(row)
        print(row, f"{time.perf_counter() - start:.0f} s", flush=True)
        return found

    dense = 0.0
    dense = measure("dense", 1.0, model)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        profile = inspect(source, run / "run", texts=[str(args.calibration)], tokens=CALIBRATION_TOKENS)
        tensors = load_file(run / "run" / "profile.safetensors")
        for share in SHARES:
            plan, _ = make_plan(run / "run", run / "plan.json", share, None)
            kept = kept_directions(profile.shape, plan, tensors)
            predicted = round(plan.predicted["damage"], 4)
            measure("measured, planned widths", share, build_student(model, plan, kept=kept), predicted_nats=predicted)
            even = uniform(profile, share)
            kept = kept_directions(profile.shape, even, tensors)
            measure("measured, uniform widths", share, build_student(model, even, kept=kept))
            if share == SVD_SHARE:
                alone = replace(even, layers=tuple(replace(layer, rope_pairs=None) for layer in even.layers))
                measure("weights alone, uniform widths", share, build_student(model, alone))
    found = {
        "model": "SmolLM2-135M-Instruct, float32",
        "text": args.text.name,
        "tokens": windows.numel(),
        "context": args.context,
        "calibration": args.calibration.name,
        "calibration_tokens": CALIBRATION_TOKENS,
        "seed": 0,
        "machine": platform.machine(),
        "rows": rows,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
