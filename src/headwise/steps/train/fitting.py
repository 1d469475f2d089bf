"""A plan and examples in, trained weights out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headwise.data.sources import Datum
from headwise.files.errors import InputError
from headwise.files.progress import Progress
from headwise.linalg.divergence import perplexity
from headwise.records.blueprint import Text
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig, usual_rate
from headwise.steps.train.examples import Examples
from headwise.steps.train.pictures import read_pictures
from headwise.steps.train.windows import read_windows
from headwise.training.fresh import fresh_model
from headwise.training.loop import Schedule, fit
from headwise.training.order import shuffled
from headwise.training.work import Work

BYTES = 4  # of a weight


def read_examples(
    plan: Plan,
    data: Sequence[Datum],
    tokenizer: str | None,
    config: TrainConfig,
    folder: Path,
    progress: Progress,
    *,
    trust_remote_code: bool = False,
) -> Examples:
    """What a model of ``plan`` learns from; ``folder`` keeps what is made of ``data`` on the way."""
    reads = plan.require_blueprint().reads
    if not data:
        raise InputError("There is nothing to learn from: give `data`.")
    if isinstance(reads, Text):
        return read_windows(reads, data, tokenizer, config, folder, progress, trust_remote_code=trust_remote_code)
    if tokenizer is not None or config.context is not None:
        raise InputError("A vit reads images: leave out `tokenizer` and `context`.")
    return read_pictures(reads, data, config)


def check_plan(plan: Plan) -> None:
    """Raise where no model can be built from ``plan``, or none on this machine."""
    parameters = plan.shape_to_build().total_parameters()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if BYTES * parameters > memory:
        raise InputError(
            f"The weights of this plan take {BYTES * parameters / 1e9:,.0f} GB in float32, and this machine has "
            f"{memory / 1e9:,.0f} GB."
        )


def settled(config: TrainConfig, plan: Plan, examples: Examples) -> TrainConfig:
    """``config`` with nothing left open."""
    return replace(
        config,
        tokens=config.tokens or examples.count * examples.tokens_each,
        rate=config.rate or usual_rate(plan.shape_to_build().total_parameters()),
        context=examples.tokens_each,
    )


def whole_steps(tokens: float, step_tokens: int) -> int:
    """Steps that come nearest to learning from ``tokens``, at least one."""
    return max(1, round(tokens / step_tokens))


def run_hash(plan: Plan, data: str, config: TrainConfig, processes: int = 1) -> str:
    """What tells this training, on ``data`` of a hash, from any other."""
    facts = [plan.text(), data, config.facts(), processes]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Task:
    """One training: what a model is asked, and how well it answers."""

    def __init__(
        self, examples: Examples, config: TrainConfig, half: bool, processes: int = 1, process: int = 0
    ) -> None:
        self.examples, self.config, self.half = examples, config, half
        self.processes, self.process = processes, process
        self.step_tokens = config.batch * config.accumulate * processes * examples.tokens_each
        self._options = {"use_cache": False} if examples.tokenizer else {}

    def loss(self, model: nn.Module, part: int) -> Tensor:
        """Cross-entropy of the batch that is this process's share of ``part``."""
        first = (part * self.processes + self.process) * self.config.batch
        logits, wanted = self._run(model, shuffled(self.examples.count, first, self.config.batch, self.config.seed))
        return cross_entropy(logits, wanted)

    def judge(self, model: nn.Module) -> dict[str, float]:
        """Cross-entropy on all held-out rows, and what people call it: perplexity or accuracy."""
        numbers = torch.arange(self.examples.count, self.examples.count + self.examples.held_out)
        text, nats, right, total = bool(self.examples.tokenizer), 0.0, 0, 0
        with torch.no_grad():
            for some in numbers.split(self.config.batch):
                logits, wanted = self._run(model, some)
                nats += cross_entropy(logits, wanted, reduction="sum").item()
                right += 0 if text else int((logits.argmax(-1) == wanted).sum())
                total += len(wanted)
        loss = nats / total
        return {"loss": loss, **({"perplexity": perplexity(loss)} if text else {"accuracy": right / total})}

    def _run(self, model: nn.Module, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and wanted classes, a row for each answer."""
        inputs, wanted = self.examples.rows(numbers)
        device = next(model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16) if self.half else nullcontext():
            logits = model(**{name: tensor.to(device) for name, tensor in inputs.items()}, **self._options).logits
        return logits.flatten(0, -2).float(), wanted.flatten().to(device)


def fit_plan(accelerator: Accelerator, plan: Plan, task: Task, work: Work, progress: Progress) -> None:
    """Train a model of ``plan`` by ``task``, whose settings are `settled`; ``work`` keeps its best weights."""
    config = task.config
    model = fresh_model(plan, config.seed)
    if accelerator.distributed_type != DistributedType.FSDP:  # which may be needed because one device cannot hold it
        model.to(accelerator.device)
    steps = whole_steps(cast(int, config.tokens), task.step_tokens)
    schedule = Schedule(
        steps=steps,
        rate=cast(float, config.rate),
        every=max(1, steps // config.evaluations),
        tokens=task.step_tokens,
        accumulate=config.accumulate,
        decay=config.decay,
    )
    fit(accelerator, model, schedule, task.loss, task.judge, work, progress)
