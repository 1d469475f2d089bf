"""Training from scratch: a plan of `headwise design` and data in, a model folder out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headwise.checkpoints.save import save_student
from headwise.data.processors import open_tokenizer
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.plan import Plan
from headwise.records.training import CURVE, TrainConfig
from headwise.steps.train.fitting import Task, check_plan, fit_plan, read_examples, run_hash, settled
from headwise.training.fresh import fresh_model
from headwise.training.loop import put_weights
from headwise.training.processes import first_then_all, join_processes, use_bf16
from headwise.training.work import Work


@locking("output")
def train(
    plan_file: Path,
    data: Sequence[Path],
    output: Path,
    *,
    tokenizer: str | None = None,
    config: TrainConfig | None = None,
    track: str | None = None,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a model of the plan's shape on ``data`` and write it to ``output`` at its best.

    Under ``torchrun`` all processes share each step, and all but the first return nothing. A rerun continues from the
    last checkpoint, which lies beside ``output`` until all is done. ``trust_remote_code`` lets ``tokenizer`` run code
    of its own.
    """
    plan, asked = Plan.load(plan_file), config or TrainConfig()
    check_free(output)
    check_plan(plan)
    folder = output.with_name(f"{output.name}.training")
    accelerator = join_processes(track, output.with_name(f"{output.name}.logs"))
    trusted = {"trust_remote_code": trust_remote_code}
    examples = first_then_all(
        accelerator, lambda: read_examples(plan, data, tokenizer, asked, folder, progress, **trusted)
    )
    config = settled(asked, plan, examples)
    half = use_bf16(accelerator, config.precision, plan.width)
    config = replace(config, precision="bf16" if half else "fp32")
    work = Work(folder, run_hash(plan, examples.sha256, config, accelerator.num_processes))
    if track is not None:
        accelerator.init_trackers("headwise-train", config=config.facts())
    task = Task(examples, config, half, accelerator.num_processes, accelerator.process_index)
    fit_plan(accelerator, plan, task, work, progress)
    accelerator.end_training()
    best = work.best() if accelerator.is_main_process else None
    if best is None:
        return {}
    model = fresh_model(plan)  # a whole one: what was trained may be split over processes
    put_weights(model, best.tensors)
    if examples.tokenizer:
        end = open_tokenizer(examples.tokenizer, **trusted).eos_token_id
        model.config.update({"bos_token_id": end, "eos_token_id": end})
        cast(Any, model.generation_config).update(bos_token_id=end, eos_token_id=end)
    lines = work.metrics()
    scores = next(line["scores"] for line in lines if "scores" in line and line["step"] == best.step)
    told = {
        **config.facts(),
        "data": ", ".join(path.name for path in data),
        "tokens": lines[-1]["tokens"],
        "best": best.step,
        "scores": scores,
    }
    found = save_student(
        model,
        output,
        plan=plan,
        source=examples.tokenizer,
        command=command,
        facts={"trained": told},
        files={CURVE: "".join(json.dumps(line) + "\n" for line in lines)},
    )
    shutil.rmtree(folder, ignore_errors=True)
    return {**found, **told, "notes": [*found["notes"], *work.notes]}
