"""A training step of headwise beside one of a minimal hand-written PyTorch loop, for the same model: tokens per second.

    python benchmarks/train_speed.py [--params 3M] [--steps 20] [--rounds 5] [-o results/train_speed.json]

A llama of the textbook's shape and one whose layers differ, as `headwise design` gives them, each on 8 windows of 256
tokens a step. Each measurement is a process of its own; the two take turns, so that a slow minute hits both.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from headwise.families.fresh import fresh_model
from headwise.records import Plan
from headwise.records.blueprint import Text
from headwise.records.design import Request
from headwise.records.training import Training
from headwise.steps.design import design
from headwise.steps.train.examples import Examples
from headwise.steps.train.fitting import Task, fit_plan
from headwise.steps.train.windows import rows_of
from headwise.training.processes import join_processes
from headwise.training.work import Work

BATCH, CONTEXT, VOCAB, WARM, RATE = 8, 256, 2048, 3, 1e-3


def ours(plan, tokens, bf16, steps, folder):
    """When each step of headwise's loop began."""
    times = []

    class Timed(Task):
        def loss(self, model, part):
            times.append(time.perf_counter())
            return super().loss(model, part)

        def judge(self, model):
            times.append(time.perf_counter())
            return {"loss": 0.0}

    count = len(tokens) // CONTEXT - 1
    examples = Examples(rows_of(tokens, CONTEXT), count, 1, CONTEXT, "random", "random", "none")
    how = Training(tokens=(steps + WARM) * BATCH * CONTEXT, rate=RATE, batch=BATCH, evaluations=1)
    fit_plan(join_processes(folder), plan, Timed(examples, how, bf16), Work(folder, "speed"), lambda *told: None)
    return times


def theirs(plan, tokens, bf16, steps, folder):
    """When each step of the hand-written loop began."""
    model, times = fresh_model(plan), []
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(steps + WARM):
        times.append(time.perf_counter())
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,)).tolist()
        rows = torch.from_numpy(np.stack([tokens[i : i + CONTEXT + 1] for i in starts]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    return [*times, time.perf_counter()]


def one(who, plan, precision, steps):
    """Tokens per second of one of the two."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "tokens.bin"
        np.random.default_rng(0).integers(0, VOCAB, 2**20).astype(np.uint16).tofile(file)
        tokens = np.memmap(file, np.uint16, mode="r")
        loop = {"headwise": ours, "by hand": theirs}[who]
        times = loop(Plan.load(plan), tokens, precision == "bf16", steps, Path(name))
    return BATCH * CONTEXT / median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=3e6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/train_speed.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.one:
        print(one(*args.one, args.steps))
        return
    found = {
        "parameters": int(args.params),
        "tokens_a_step": BATCH * CONTEXT,
        "steps": args.steps,
        "rounds": args.rounds,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    candidates = design(Request("llama", int(args.params), Text(VOCAB, CONTEXT, tied=True))).candidates
    mixed = next(candidate for candidate in candidates if len(set(candidate.plan.layers)) > 1)
    with tempfile.TemporaryDirectory() as name:
        for candidate in (candidates[0], mixed):
            shape, plan = candidate.name, Path(name) / "plan.json"
            candidate.plan.save(plan)
            for precision in ("fp32", "bf16"):
                rows = {"headwise": [], "by hand": []}
                for _ in range(args.rounds):
                    for who, row in rows.items():
                        command = [sys.executable, __file__, "--one", who, plan, precision, "--steps", args.steps]
                        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
                        row.append(float(done.stdout.split()[-1]))
                ratios = sorted(a / b for a, b in zip(*rows.values(), strict=True))
                found[f"{shape}, {precision}"] = {
                    "tokens_per_second": {who: round(median(row), 1) for who, row in rows.items()},
                    "headwise_times_as_fast": round(median(ratios), 3),
                    "by_round": [round(ratio, 3) for ratio in ratios],
                }
                print(shape, precision, json.dumps(found[f"{shape}, {precision}"]), flush=True)
                args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
