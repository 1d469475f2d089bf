"""Healing: a reduced model learns from the whole one what the cut has taken, and is saved at its best."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint
from headwise.checkpoints.load import open_model
from headwise.checkpoints.save import save_student
from headwise.data.fitness import check_settings
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.families.sites import has_one_stack
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.healing import CURVE, HealConfig
from headwise.records.plan import LayerPlan, Plan
from headwise.records.settings import TextFormat
from headwise.steps.heal import local
from headwise.steps.heal.teacher import Memory, Teacher
from headwise.steps.heal.windows import Windows, read_windows
from headwise.tracing.gradient_checkpointing import checkpointed
from headwise.tracing.scoring import predicts_next
from headwise.training.loop import STAGE as GLOBAL
from headwise.training.loop import Schedule, fit, learning, put_weights, score_weights, sizes_of
from headwise.training.processes import in_half, join_processes
from headwise.training.trainable import make_trainable
from headwise.training.work import Work

if TYPE_CHECKING:
    from accelerate import Accelerator

START, MEMORY = "start", "teacher"


@locking("output")
def heal(
    source: str,
    teacher_source: str,
    output: Path,
    *,
    texts: Sequence[str] = (),
    inputs: Path | None = None,
    text_format: TextFormat = "auto",
    accept_text: bool = False,
    config: HealConfig | None = None,
    track: str | None = None,
    command: str = "",
    trust_remote_code: bool = False,
    teacher: PreTrainedModel | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train the reduced model at ``source`` towards the one it was cut from, and write it to ``output`` at its best.

    Under ``torchrun`` all processes share each step, and all but the first return nothing. A rerun continues from the
    last checkpoint, which lies beside ``output`` until all is done. ``trust_remote_code`` lets tokenizers run code of
    their own. ``teacher`` is the model at ``teacher_source``, where it is open already; it is placed where training is.
    """
    config = config or HealConfig()
    check_free(output)
    plan_file = Path(source).expanduser() / "plan.json"
    if not plan_file.is_file():
        raise InputError(f"{source} holds no plan.json: only what headwise compress wrote can be healed.")
    plan = Plan.load(plan_file)
    student = open_model(source)
    teacher = open_model(teacher_source) if teacher is None else teacher
    check_settings(student, source)
    reduced = _check_pair(source, student, teacher_source, teacher, plan, trust_remote_code)
    _check_wanted(config, teacher)
    folder = output.with_name(f"{output.name}.healing")
    accelerator = join_processes(track, output.with_name(f"{output.name}.logs"))
    dtype, half = student.dtype, in_half(accelerator, config.precision, shape_of(teacher).width)
    config = replace(config, precision="bf16" if half else "fp32")
    windows = read_windows(
        student.float(),
        source,
        list(texts),
        inputs,
        config,
        text_format,
        accept_text,
        trust_remote_code=trust_remote_code,
    )
    for model in (student, teacher):
        model.float().to(accelerator.device)
    weights = [fingerprint(student), fingerprint(teacher), files_fingerprint(source), files_fingerprint(teacher_source)]
    facts = [config.facts(), *weights, windows.sha256, accelerator.num_processes]
    work = Work(folder, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    if track is not None:
        accelerator.init_trackers("headwise-heal", config=config.facts())
    torch.manual_seed(config.seed)
    make_trainable(student, config.train, reduced)
    healer = _Healer(accelerator, student, teacher, plan, windows, config, work, progress)
    before = healer.run()
    accelerator.end_training()
    best = work.best() if accelerator.is_main_process else None
    if best is None:
        return {}
    student = open_model(source).float()  # anew: training may have split the other among processes
    torch.manual_seed(config.seed)
    settle = make_trainable(student, config.train, reduced)
    put_weights(student, best.tensors)
    name = next(iter(before))
    told = {
        "teacher": teacher_source,
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
    files = {CURVE: "".join(json.dumps(line) + "\n" for line in work.metrics())}
    student = settle()
    for tensor in student.parameters():
        tensor.data = tensor.data.to(dtype)
    found = save_student(
        student, output, plan=plan, source=source, command=command, facts={"healed": told}, files=files
    )
    shutil.rmtree(folder, ignore_errors=True)
    return {**found, **told, "notes": [*found["notes"], *work.notes]}


class _Healer:
    """One healing: the start is judged, then layers learn one by one, then all of them together."""

    def __init__(
        self,
        accelerator: Accelerator,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        plan: Plan,
        windows: Windows,
        config: HealConfig,
        work: Work,
        progress: Progress,
    ) -> None:
        self.accelerator, self.student, self.teacher, self.plan = accelerator, student, teacher, plan
        self.windows, self.config, self.work, self.progress = windows, config, work, progress
        self.processes = accelerator.num_processes
        step_tokens = round(config.batch * config.accumulate * self.processes * windows.tokens_each)
        self.steps = max(1, config.tokens // step_tokens)
        self.step_tokens = step_tokens
        rounds = self.steps * config.batch * config.accumulate * self.processes / windows.count
        memory = None
        if rounds > 1 and predicts_next(teacher) and not config.hidden:
            memory = Memory(work.folder / MEMORY, work.inputs_hash, windows.length, teacher.config.vocab_size)
        self.half = config.precision == "bf16"
        self.guide = Teacher(teacher, config, self.half, memory)
        if config.train == "all":
            self._leave_out_what_is_unused()
        self.units = sizes_of(learning(student))  # of the start: a rerun must find the same

    def run(self) -> dict[str, float]:
        """Heal; the scores of the start."""
        start = self._score(START, 0)
        if self.config.stage != "global" and has_one_stack(self.teacher) and not self.work.load(GLOBAL)[0]:
            self._layer_by_layer()
        if self.config.stage != "local":
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
                self.teacher, self.student, self.plan, batches, config, self.half, self.work, self.progress
            )
        self.accelerator.wait_for_everyone()
        step, weights = self.work.load(local.STAGE)
        put_weights(self.student, weights)
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
            accumulate=config.accumulate,
        )

        def loss(model: torch.nn.Module, part: int) -> torch.Tensor:
            first = (part * self.processes + self.accelerator.process_index) * config.batch
            rows = windows.order(first, config.batch, config.seed)
            inputs = {name: tensor[rows] for name, tensor in windows.rows.items()}
            return self.guide.loss(model, inputs, rows, first_round=first < windows.count)

        with checkpointed(self.student) if config.lean else nullcontext():
            fit(self.accelerator, self.student, schedule, loss, self._judge, self.work, self.progress, self.units)

    def _leave_out_what_is_unused(self) -> None:
        """Freeze what no output depends on, such as a pooler: moments and gradients of it would be missed."""
        first = {name: tensor[:1] for name, tensor in self.windows.held_out.items()}
        self.guide.distance(self.student, first).backward()
        for weight in learning(self.student):
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
        known = [line for line in self.work.metrics() if line["stage"] == stage and "scores" in line]
        self.accelerator.wait_for_everyone()  # all have read before one writes
        if known:
            return known[0]["scores"]
        self.progress(0, 1, "measuring")
        return score_weights(self.accelerator, self.student, self._judge, self.work, stage, step, 0)


def _check_pair(
    source: str, student: PreTrainedModel, teacher_source: str, teacher: PreTrainedModel, plan: Plan, trusted: bool
) -> Collection[int]:
    """Raise where these two do not belong together; else the attention layers of the student that were reduced."""
    before = shape_of(teacher)
    plan.check(before)
    if plan.fingerprint not in ("", fingerprint(teacher)):
        raise InputError(f"{source} was not cut from {teacher_source}: it has the same shape, but other weights.")
    kept = [i for i, change in enumerate(plan.layers) if not change.dropped]
    if len(shape_of(student).layers) != len(kept):
        raise InputError(f"{source} is not what its plan.json says; heal what headwise compress wrote.")
    _check_words(source, student, teacher_source, teacher, trusted)
    there = [j for j, i in enumerate(kept) if plan.layers[i].heads]
    return [j for j in there if plan.layers[kept[j]] != LayerPlan.full(before.layers[kept[j]])] or there


def _check_wanted(config: HealConfig, teacher: PreTrainedModel) -> None:
    if config.next_token and not predicts_next(teacher):
        raise InputError(f"{type(teacher).__name__} predicts no next token that it could learn from the text.")
    if config.stage == "local" and not has_one_stack(teacher):
        raise InputError(f"The layers of {type(teacher).__name__} cannot learn one by one: take --stage global.")


def _check_words(
    source: str, student: PreTrainedModel, teacher_source: str, teacher: PreTrainedModel, trusted: bool
) -> None:
    sizes = [getattr(model.config, "vocab_size", None) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise InputError(f"{source} knows {sizes[0]} tokens and {teacher_source} {sizes[1]}: not the same tokenizer.")
    if student.main_input_name != "input_ids":
        return
    words = [open_tokenizer(name, trust_remote_code=trusted).get_vocab() for name in (source, teacher_source)]
    if words[0] != words[1]:
        raise InputError(f"{source} and {teacher_source} have different tokenizers: one cannot learn from the other.")
