"""A reduced model and the one it was cut from in, the reduced one healed out: at its best on held-out windows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from headwise.families.sites import has_one_stack
from headwise.files.progress import Progress
from headwise.records.healing import CURVE, HealConfig
from headwise.records.plan import Plan
from headwise.runtime.cache import CacheSpec
from headwise.steps.heal import local
from headwise.steps.heal.teacher import Memory, Teacher
from headwise.steps.heal.windows import Windows
from headwise.tracing.gradient_checkpointing import gradient_checkpointing
from headwise.tracing.rounding import rounding
from headwise.tracing.scoring import predicts_next
from headwise.training.loop import STAGE as GLOBAL
from headwise.training.loop import Schedule, fit, put_weights, rms_of, score_weights, trainable_parameters
from headwise.training.trainable import make_trainable
from headwise.training.work import Work

if TYPE_CHECKING:
    from accelerate import Accelerator

START, MEMORY = "start", "teacher"


@dataclass(frozen=True, slots=True)
class Pair:
    """What is healed: ``student`` is used up, ``fresh`` gives it anew.

    ``reduced`` numbers the layers whose attention was cut, ``mlps`` those whose MLP was. ``teacher`` is in float32 on
    the device of the run. With ``codes`` it learns to read what its cache rounds so.
    """

    student: PreTrainedModel
    fresh: Callable[[], PreTrainedModel]
    teacher: PreTrainedModel
    plan: Plan
    reduced: Collection[int]
    mlps: Collection[int]
    teacher_name: str
    codes: CacheSpec | None = None

    @property
    def coded(self) -> Collection[int]:
        """Slots of the cache whose layers are rounded."""
        return () if self.codes is None else self.codes.layers


@dataclass(frozen=True, slots=True)
class Healed:
    """A healed model in the student's dtype, what its card says of that, and texts to lay beside it."""

    model: PreTrainedModel
    facts: dict[str, Any]
    files: dict[str, str]


def heal_pair(
    pair: Pair,
    windows: Windows,
    config: HealConfig,
    accelerator: Accelerator,
    work: Work,
    progress: Progress,
    *,
    everywhere: bool = False,
) -> Healed | None:
    """Heal the student of ``pair`` on ``windows``; ``work`` keeps what a rerun needs.

    Of several processes only the first gets the model, or with ``everywhere`` all do. ``config`` has no precision open.
    """
    student: Any = pair.student.float()
    student.to(accelerator.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        make_trainable(student, config.train, pair.reduced, mlps=pair.mlps, coded=pair.coded)
        before = Healer(accelerator, pair, windows, config, work, progress).run()
    best = work.best() if everywhere or accelerator.is_main_process else None
    if everywhere:
        accelerator.wait_for_everyone()  # all have read before one removes
    accelerator.end_training()
    if best is None:
        return None
    student = pair.fresh()  # anew: training may have split the other among processes
    dtype = student.dtype
    student.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        settle = make_trainable(student, config.train, pair.reduced, mlps=pair.mlps, coded=pair.coded)
    put_weights(student, best.tensors)
    name = next(iter(before))
    facts = {
        "teacher": pair.teacher_name,
        "tokens": min(config.local_tokens, config.tokens) if config.stage == "local" else config.tokens,
        "text": windows.name,
        "train": config.train,
        "stage": config.stage,
        "precision": config.precision,
        "best": f"{best.stage} {best.step}",
        "score": name,
        "before": before[name],
        "after": best.score,
    }
    student = settle()
    for tensor in student.parameters():
        tensor.data = tensor.data.to(dtype)
    return Healed(student, facts, {CURVE: "".join(json.dumps(line) + "\n" for line in work.metrics())})


class Healer:
    """One healing: the start is judged, then layers learn one by one, then all of them together."""

    def __init__(
        self,
        accelerator: Accelerator,
        pair: Pair,
        windows: Windows,
        config: HealConfig,
        work: Work,
        progress: Progress,
    ) -> None:
        student, teacher = pair.student, pair.teacher
        self.accelerator, self.student, self.teacher, self.plan = accelerator, student, teacher, pair.plan
        self.codes = pair.codes
        self.windows, self.config, self.work, self.progress = windows, config, work, progress
        self.processes = accelerator.num_processes
        batch_tokens = config.batch * self.processes * windows.tokens_each
        self.accumulate = config.batches_a_step(batch_tokens, pair.codes is not None)
        self.step_tokens = round(self.accumulate * batch_tokens)
        self.steps = max(1, config.tokens // self.step_tokens)
        rounds = self.steps * config.batch * self.accumulate * self.processes / windows.count
        memory = None
        if rounds > 1 and predicts_next(teacher) and not config.hidden:
            memory = Memory(work.folder / MEMORY, work.inputs_hash, windows.length, teacher.config.vocab_size)
        self.half = config.precision == "bf16"
        self.guide = Teacher(teacher, config, self.half, memory)
        if config.train == "all":
            self._leave_out_what_is_unused()
        self.units = rms_of(trainable_parameters(student))  # of the start: a rerun must find the same

    def run(self) -> dict[str, float]:
        """Heal; the scores of the start."""
        with rounding(self.student, self.codes):
            start = self._score(START, 0)
        if self.config.stage != "global" and has_one_stack(self.teacher) and not self.work.load(GLOBAL)[0]:
            self._layer_by_layer()
        if self.config.stage != "local":
            with rounding(self.student, self.codes):
                self._together()
        return start

    def _layer_by_layer(self) -> None:
        config, windows = self.config, self.windows
        if self.accelerator.is_main_process:
            tokens = min(config.local_tokens, config.tokens)
            count = max(1, min(windows.count, round(tokens / windows.tokens_each)))
            rows = windows.order(0, count, config.seed).split(max(1, round(local.STEP / windows.tokens_each)))
            batches = [{name: tensor[some] for name, tensor in windows.rows.items()} for some in rows]
            local.heal_locally(
                self.teacher, self.student, self.plan, self.codes, batches, config, self.half, self.work, self.progress
            )
        self.accelerator.wait_for_everyone()
        step, weights = self.work.load(local.STAGE)
        put_weights(self.student, weights)
        with rounding(self.student, self.codes):
            self._score(local.STAGE, step)
        best = self.work.best()
        if best is not None and best.stage == START:
            put_weights(self.student, best.tensors)

    def _together(self) -> None:
        config, windows = self.config, self.windows
        schedule = Schedule(
            steps=self.steps,
            rate=config.speed(self._distance()),
            every=max(1, self.steps // config.evaluations),
            tokens=self.step_tokens,
            accumulate=self.accumulate,
        )

        def loss(model: torch.nn.Module, part: int) -> torch.Tensor:
            first = (part * self.processes + self.accelerator.process_index) * config.batch
            rows = windows.order(first, config.batch, config.seed)
            inputs = {name: tensor[rows] for name, tensor in windows.rows.items()}
            return self.guide.loss(model, inputs, rows, first_round=first < windows.count)

        with gradient_checkpointing(self.student) if config.lean else nullcontext():
            fit(self.accelerator, self.student, schedule, loss, self._judge, self.work, self.progress, self.units)

    def _leave_out_what_is_unused(self) -> None:
        """Freeze what no output depends on, such as a pooler: moments and gradients of it would be missed."""
        first = {name: tensor[:1] for name, tensor in self.windows.held_out.items()}
        self.guide.distance(self.student, first).backward()
        for weight in trainable_parameters(self.student):
            weight.requires_grad_(weight.grad is not None)
        self.student.zero_grad()

    def _distance(self) -> float:
        """The best score on held-out windows before all layers learn together."""
        lines = [line for line in self.work.metrics() if line["stage"] != GLOBAL and "scores" in line]
        return min(next(iter(line["scores"].values())) for line in lines)

    def _judge(self, model: torch.nn.Module) -> dict[str, float]:
        return self.guide.judge(model, self.windows.held_out, self.config.batch)

    def _score(self, stage: str, step: int) -> dict[str, float]:
        """Scores on the held-out windows as things are now, put down and taken back in a rerun."""
        scored = [line for line in self.work.metrics() if line["stage"] == stage and "scores" in line]
        self.accelerator.wait_for_everyone()  # all have read before one writes
        if scored:
            return scored[0]["scores"]
        self.progress(0, 1, "measuring")
        return score_weights(self.accelerator, self.student, self._judge, self.work, stage, step, 0)
