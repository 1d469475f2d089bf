"""A healing step of headwise beside one of `transformers.Trainer` with the same KL loss: time and peak memory.

    python benchmarks/heal_speed.py [--steps 8] [--rounds 3] [-o results/heal_speed.json]

SmolLM2-135M cut to 48 of 64 dimensions everywhere, its attention trained on 2 windows of 512 tokens a step. Each
measurement is a process of its own; the two take turns, so that a slow minute hits both.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from accelerate import Accelerator
from torch.nn.functional import kl_div
from transformers import Trainer, TrainerCallback, TrainingArguments

from headwise.checkpoints.load import open_model
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.healing import HealConfig
from headwise.reduction.reduce import reduce_model
from headwise.steps.demo import demo_model
from headwise.steps.heal.teacher import Teacher
from headwise.training.loop import Schedule, fit
from headwise.training.trainable import make_trainable
from headwise.training.work import Work

BATCH, CONTEXT, WARM = 2, 512, 2


def prepared():
    """The whole model, the cut one with only its attention asking for gradients, and windows of tokens."""
    teacher = open_model(str(demo_model())).float()
    shape = shape_of(teacher)
    plan = Plan.make(shape, tuple(LayerPlan(layer.heads, layer.kv_heads, 48, 48) for layer in shape.layers))
    student = reduce_model(teacher, plan, {}, "svd", refit=()).model
    make_trainable(student, "attention", range(len(shape.layers)))
    windows = torch.randint(0, 49000, (64, CONTEXT), generator=torch.Generator().manual_seed(0))
    return teacher.requires_grad_(False), student, windows


def ours(bf16, steps, folder):
    """Seconds of each step of headwise's loop."""
    teacher, student, windows = prepared()
    guide, times = Teacher(teacher, HealConfig(), bf16, None), []

    def loss(model, part):
        times.append(time.perf_counter())
        rows = torch.arange(part * BATCH, (part + 1) * BATCH) % len(windows)
        return guide.loss(model, {"input_ids": windows[rows]}, rows, first_round=True)

    schedule = Schedule(steps + WARM, 1e-4, steps + WARM + 1, BATCH * CONTEXT)
    fit(
        Accelerator(cpu=True),
        student,
        schedule,
        loss,
        lambda model: {"nothing": times.append(time.perf_counter()) or 0.0},
        Work(folder, "speed"),
    )
    return times


def theirs(bf16, steps, folder):
    """Seconds of each step of the Trainer."""
    teacher, student, windows = prepared()
    times = []

    class Distil(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            found = model(**inputs, use_cache=False).logits
            with torch.no_grad(), self.compute_loss_context_manager():
                wanted = teacher(**inputs, use_cache=False).logits
            now, before = found.float().log_softmax(-1).flatten(0, 1), wanted.float().log_softmax(-1).flatten(0, 1)
            return kl_div(now, before, log_target=True, reduction="batchmean")

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_train_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        max_steps=steps + WARM,
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        learning_rate=1e-4,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    data = [{"input_ids": row} for row in windows]
    Distil(student, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return times


def measure(who, precision, steps):
    """What a fresh process finds."""
    command = [sys.executable, __file__, "--one", who, precision, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/heal_speed.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.one:
        who, precision = args.one
        with tempfile.TemporaryDirectory() as name:
            times = {"headwise": ours, "trainer": theirs}[who](precision == "bf16", args.steps, Path(name))
        seconds = median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))
        print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
        return
    found = {
        "model": "SmolLM2-135M-Instruct cut to 48 dimensions, attention trained",
        "tokens_a_step": BATCH * CONTEXT,
        "steps": args.steps,
        "rounds": args.rounds,
        "seed": 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    for precision in ("fp32", "bf16"):
        rows = {who: [] for who in ("headwise", "trainer")}
        for _ in range(args.rounds):
            for who, row in rows.items():
                row.append(measure(who, precision, args.steps))
        ratios = [theirs[0] / ours[0] for ours, theirs in zip(*rows.values(), strict=True)]
        found[precision] = {
            "tokens_per_second": {
                who: round(BATCH * CONTEXT / median(row[0] for row in some), 1) for who, some in rows.items()
            },
            "peak_gigabytes": {who: round(median(row[1] for row in some), 2) for who, some in rows.items()},
            "headwise_times_as_fast": [round(ratio, 3) for ratio in sorted(ratios)],
        }
        print(precision, json.dumps(found[precision]), flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
