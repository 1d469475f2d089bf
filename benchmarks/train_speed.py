"""A training step of headwise beside one of a minimal hand-written PyTorch loop, for the same model: tokens per second.

    python benchmarks/train_speed.py [--params 3e6] [--steps 60] [-o results/train_speed.json]

A llama of the textbook's shape and one whose layers differ, as `headwise design` gives them, each on 8 windows of 256
tokens a step. The two take turns step by step, so that a slow moment hits both.
"""

import argparse
import json
import platform
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from headwise.records.blueprint import Text
from headwise.records.design import Request
from headwise.records.settings import TrainConfig
from headwise.steps.design import propose
from headwise.steps.train.examples import Examples
from headwise.steps.train.fitting import Task, fit_plan
from headwise.steps.train.windows import rows_of
from headwise.training.fresh import fresh_model
from headwise.training.processes import join_processes
from headwise.training.work import Work

BATCH, CONTEXT, VOCAB, WARM, RATE = 8, 256, 2048, 3, 1e-3


class ByHand:
    """The minimal loop, a step at a time."""

    def __init__(self, plan, tokens, bf16):
        self.model, self.tokens, self.bf16 = fresh_model(plan), tokens, bf16
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self):
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,)).tolist()
        rows = torch.from_numpy(np.stack([self.tokens[i : i + CONTEXT + 1] for i in starts]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()


def seconds_of_steps(plan, tokens, bf16, steps, folder):
    """Seconds of each step of headwise's loop, and of one by hand before each of them."""
    by_hand, found = ByHand(plan, tokens, bf16), {"headwise": [], "by hand": []}
    begun = None

    def between():
        nonlocal begun
        now = time.perf_counter()
        if begun is not None:
            found["headwise"].append(now - begun)
        by_hand.step()
        begun = time.perf_counter()
        found["by hand"].append(begun - now)

    class Timed(Task):
        def loss(self, model, part):
            between()
            return super().loss(model, part)

        def judge(self, model):
            between()
            return {"loss": 0.0}

    count = len(tokens) // CONTEXT - 1
    examples = Examples(rows_of(tokens, CONTEXT), count, 1, CONTEXT, "random", "random", "none")
    config = TrainConfig(tokens=(steps + WARM) * BATCH * CONTEXT, rate=RATE, batch=BATCH, evaluations=1)
    fit_plan(join_processes(), plan, Timed(examples, config, bf16), Work(folder, "speed"), lambda *told: None)
    return {who: times[WARM : WARM + steps] for who, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=3e6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/train_speed.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {
        "parameters": int(args.params),
        "tokens_a_step": BATCH * CONTEXT,
        "steps": args.steps,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    tokens = np.random.default_rng(0).integers(0, VOCAB, 2**20).astype(np.uint16)
    candidates = propose(Request("llama", int(args.params), Text(VOCAB, CONTEXT, tied=True))).candidates
    mixed = next(candidate for candidate in candidates if len(set(candidate.plan.before)) > 1)
    for candidate in (candidates[0], mixed):
        for precision in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as name:
                times = seconds_of_steps(candidate.plan, tokens, precision == "bf16", args.steps, Path(name))
            ratios = [b / a for a, b in zip(times["headwise"], times["by hand"], strict=True)]
            row = {
                "tokens_per_second": {who: round(BATCH * CONTEXT / median(each), 1) for who, each in times.items()},
                "headwise_times_as_fast": round(median(ratios), 3),
                "middle_half": [round(each, 3) for each in quantiles(ratios, n=4)[::2]],
            }
            found[f"{candidate.name}, {precision}"] = row
            print(candidate.name, precision, json.dumps(row), flush=True)
            args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
