"""Predicted decode time against measured: of plans within bytes and time, and at random.

    python benchmarks/decode_time.py MODEL PROFILE [--dtype fp32] [--contexts 1024,8192] [-o results/decode_time.json]

MODEL is a folder, or "smollm2" for the model of the demo; PROFILE the folder of its profile. For each context rates are
measured anew; then plans are carried out (weights cut anyhow, codes of any levels) and timed in turns with the dense
model in one process: median milliseconds of one new token after a cache of random numbers, as a ratio to the dense
model's. No plan that is measured was among those the rates were fitted to.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from bits import Table, commit

from headwise.checkpoints.load import open_model
from headwise.files.errors import BudgetError
from headwise.records.budget import Budget
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.reduction.plans import plan_for
from headwise.steps import timing
from headwise.steps.demo import demo_model
from headwise.tracing.speed import now

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ASKED = (  # share of the bytes and of the time, None: not limited
    (0.27, None),
    (0.125, None),
    (0.125, 1.5),
    (0.125, 1.1),
    (0.125, 0.9),
    (0.27, 0.9),
    (None, 0.8),
    (None, 0.7),
)
RANDOM = 4
WARM, COUNTED, ROUNDS = 6, 4, 5


def asked(profile: Profile, kv: float | None, time: float | None, context: int, rates: Any) -> Plan | None:
    """The plan for such shares; None where there is none."""
    limits = [Budget("keep_decode_time", time, context)] if time is not None else []
    if kv is not None:
        limits.insert(0, Budget("keep_kv", kv, context))
    first, *also = limits
    budget = Budget(first.kind, first.amount, context, also=tuple(also)).with_timing(rates)
    try:
        return plan_for(profile, budget, cache="mixed" if time is not None else "latent")
    except BudgetError:
        return None


def tokens_per_model(model: Any, plans: dict[str, Plan], context: int) -> dict[str, float]:
    """Median milliseconds of one token of every plan, measured in turns."""
    token = torch.ones(1, 1, dtype=torch.long)
    running = {}
    for name, plan in plans.items():
        small, cache = timing.reduced_with_cache(model, plan, context)
        running[name] = small, cache
    seconds: dict[str, list[float]] = {name: [] for name in running}
    with torch.inference_mode():
        for count in (WARM, *(COUNTED,) * ROUNDS):
            for name, (small, cache) in running.items():
                for _ in range(count):
                    start = now()
                    cast(Any, small)(token, past_key_values=cache)
                    seconds[name].append(now() - start)
    return {name: 1000 * statistics.median(each[WARM:]) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
    parser.add_argument("profile", type=Path, help="the folder of its profile")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/decode_time.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    source = str(demo_model()) if args.model == "smollm2" else args.model
    model = open_model(source).to(DTYPES[args.dtype]).eval()
    profile, table, version = Profile.load(args.profile / "profile.json"), Table(args.output), commit()
    for context in map(int, args.contexts.split(",")):
        rates = timing.measure_timing(model, profile, context, device="cpu", dtype=args.dtype)
        plans = {"dense": Plan.full(profile.shape)}
        for kv, time in ASKED:
            plan = asked(profile, kv, time, context, rates)
            name = ", ".join(f"{what} {share:g}" for what, share in (("bytes", kv), ("time", time)) if share)
            if plan is not None:
                plans[name] = plan
            else:
                print(f"{context}: {name} is not possible", flush=True)
        chance = random.Random(1)
        for number in range(RANDOM):
            plans[f"random {number}"] = timing.random_plan(profile, context, chance)
        measured = tokens_per_model(model, plans, context)
        dense = rates.of_model(profile.shape)
        for name, plan in plans.items():
            shape = profile.shape.planned(plan)
            predicted, ratio = rates.of_model(shape) / dense, measured[name] / measured["dense"]
            bytes_ = Budget("keep_kv", 1.0, context)
            row = {
                "model": Path(source).name,
                "dtype": args.dtype,
                "threads": torch.get_num_threads(),
                "context": context,
                "plan": name,
                "bytes": round(bytes_.measure(shape) / bytes_.measure(profile.shape), 4),
                "loss": round(float(plan.predicted.get("loss_increase", 0.0)), 4),
                "milliseconds": round(measured[name], 1),
                "ratio": round(ratio, 3),
                "predicted": round(predicted, 3),
                "off": round(predicted / ratio - 1, 3),
            }
            table.add({**row, "commit": version})


if __name__ == "__main__":
    main()
