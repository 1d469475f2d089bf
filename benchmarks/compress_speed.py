"""Seconds from a model and 8,192 tokens to a saved, checked, smaller model, against plain passes over the same tokens.

    python benchmarks/compress_speed.py [--tokens 8192] [-o results/compress_speed.json]

Statistics (moments, then one backward for the loss's sensitivity), plan and compress with its refit and its check in a
fresh process. Beside it: plain forward passes, and forward and backward passes, over the same windows in the same run.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from headwise.checkpoints.load import open_model
from headwise.checkpoints.profile_tensors import profiled_batches
from headwise.pipelines.profile import inspect_folder
from headwise.records.budget import Budget
from headwise.records.settings import CompressConfig, InspectConfig
from headwise.steps.compress import compress
from headwise.steps.demo import demo_model
from headwise.steps.plan import make_plan


def timed(what, *args, **options):
    """Seconds that a call takes."""
    start = time.perf_counter()
    what(*args, **options)
    return time.perf_counter() - start


def forward(model, batches):
    """Plain forward passes."""
    with torch.inference_mode():
        for batch in batches:
            model(**batch, use_cache=False)


def both(model, batches):
    """Forward and backward passes, as training does them."""
    for batch in batches:
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        model.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/compress_speed.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, plan = folder / "run", folder / "plan.json"
        seconds = {
            "statistics": timed(inspect_folder, source, run, config=InspectConfig(tokens=args.tokens, maps=False)),
            "plan": timed(make_plan, run, plan, Budget("keep_kv", args.share)),
            "compress": timed(compress, source, plan, folder / "model"),
            "compress without refit": timed(
                compress, source, plan, folder / "plain", config=CompressConfig(refit="none")
            ),
        }
        batches = [batch.inputs for batch in profiled_batches(load_file(run / "profile.safetensors"))]
    model = open_model(source).float()
    plain = {"forward": timed(forward, model, batches), "forward and backward": timed(both, model, batches)}
    backward = plain["forward and backward"] - plain["forward"]
    refitted = seconds["statistics"] + seconds["plan"] + seconds["compress"]
    unrefitted = seconds["statistics"] + seconds["plan"] + seconds["compress without refit"]
    found = {
        "model": "SmolLM2-135M-Instruct, float32",
        "tokens": args.tokens,
        "kv_share": args.share,
        "seed": 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "seconds": {name: round(value, 1) for name, value in (seconds | plain).items()},
        "times_forward_after_one_backward": round((refitted - backward) / plain["forward"], 2),
        "the_same_without_refit": round((unrefitted - backward) / plain["forward"], 2),
    }
    print(json.dumps(found, indent=1))
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
