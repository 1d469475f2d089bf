"""Healing: a reduced model learns from the dense one what the cut has taken, and comes back at its best."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import files_fingerprint, fingerprint
from headwise.checkpoints.load import open_model
from headwise.checkpoints.origin import Origin, made_by_headwise, remember, source_of
from headwise.checkpoints.packed import codes_of
from headwise.checkpoints.save import write_model
from headwise.data.fitness import check_settings
from headwise.data.processors import open_tokenizer
from headwise.data.ready import are_batches
from headwise.families.shapes import shape_of
from headwise.families.sites import has_one_stack
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_free
from headwise.records.healing import CURVE, HealConfig
from headwise.records.plan import Plan
from headwise.records.settings import Dtype, OpenConfig, Precision, ReadConfig
from headwise.steps.heal.healer import Pair, heal_pair
from headwise.steps.heal.windows import own_windows, read_windows
from headwise.tracing.scoring import predicts_next
from headwise.training.processes import join_processes, shared_folder, use_bf16
from headwise.training.work import Work

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["CURVE", "heal", "heal_model"]


def heal_model(
    student: PreTrainedModel,
    *,
    teacher: PreTrainedModel,
    tokenizer: Any = None,
    text: Any = None,
    inputs: Any = None,
    config: HealConfig | None = None,
    reading: ReadConfig | None = None,
    progress: Progress = silent,
) -> PreTrainedModel:
    """A copy of the reduced model ``student``, trained towards the ``teacher`` it was cut from, at its best.

    Both are left as they were, dtype and device included. ``text`` is what it learns from, as `inspect` takes it, by
    default the text that comes with headwise; the end of it is held out and only measured on. Without a ``tokenizer``
    the one that belongs to the student is opened. ``inputs`` are for models that do not read text.

    >>> healed = hw.heal(small, teacher=model, tokenizer=tokenizer, text=text, config=hw.HealConfig(tokens=512))
    >>> hw.plan_of(healed) == hw.plan_of(small)
    True
    """
    config, reading, origin = config or HealConfig(), reading or ReadConfig(), made_by_headwise(student)
    names = ("`student`", "`teacher`")
    reduced = _check_pair(names, student, teacher, origin.plan)
    _check_wanted(config, teacher)
    if tokenizer is None:
        tokenizer = origin.tokenizer
    batches = inputs is not None or are_batches(text)
    if tokenizer is None and not origin.source and not batches:
        raise InputError("Nobody knows the tokenizer of `student`: give it as `tokenizer`.")
    words = open_tokenizer(origin.source) if tokenizer is None and not batches else tokenizer
    accelerator = join_processes()
    config = _settled(config, accelerator, teacher)

    def fresh() -> PreTrainedModel:
        return copy.deepcopy(student).eval()

    windows, codes = own_windows(student, words, text, inputs, config, reading), codes_of(student)
    with shared_folder(accelerator) as folder, _taught_by(teacher, accelerator.device) as taught:
        name = source_of(teacher) or type(teacher).__name__
        pair = Pair(fresh(), fresh, taught, origin.plan, *reduced, name, codes)
        work = Work(folder, windows.sha256)
        healed = heal_pair(pair, windows, config, accelerator, work, progress, everywhere=True)
    assert healed is not None  # every process reads the best weights
    model: Any = healed.model
    if codes is not None:
        codes = replace(codes, fingerprint=fingerprint(model))
    origin = Origin(origin.plan, origin.source, {"healed": healed.facts}, healed.files, tokenizer, codes)
    return remember(model.to(student.device).train(student.training), origin)


@locking("output")
def heal(
    source: str,
    teacher_source: str,
    output: Path,
    *,
    texts: Sequence[str] = (),
    inputs: Path | None = None,
    config: HealConfig | None = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    track: str | None = None,
    command: str = "",
    teacher: PreTrainedModel | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train the reduced model at ``source`` towards the one it was cut from, and write it to ``output`` at its best.

    Under ``torchrun`` all processes share each step, and all but the first return nothing. A rerun continues from the
    last checkpoint, which lies beside ``output`` until all is done. ``teacher`` is the model at ``teacher_source``,
    where it is open already; it is placed where training is.
    """
    config, reading, opening = config or HealConfig(), reading or ReadConfig(), opening or OpenConfig()
    check_free(output)
    plan_file = Path(source).expanduser() / "plan.json"
    if not plan_file.is_file():
        raise InputError(f"{source} holds no plan.json: only what headwise compress wrote can be healed.")
    plan = Plan.load(plan_file)
    student = open_model(source)
    codes = codes_of(student, source)
    teacher = open_model(teacher_source) if teacher is None else teacher
    check_settings(student, source)
    reduced = _check_pair((source, teacher_source), student, teacher, plan)
    _check_words((source, teacher_source), student, trusted=opening.trust_remote_code)
    _check_wanted(config, teacher)
    folder = output.with_name(f"{output.name}.healing")
    accelerator = join_processes(track, output.with_name(f"{output.name}.logs"), opening.device)
    if opening.dtype != "auto":
        config = replace(config, precision=_precision(opening.dtype))
    config = _settled(config, accelerator, teacher)
    windows = read_windows(
        student.float(), source, texts, inputs, config, reading, trust_remote_code=opening.trust_remote_code
    )
    weights = [fingerprint(student), fingerprint(teacher), files_fingerprint(source), files_fingerprint(teacher_source)]
    weights += [] if codes is None else [codes.digest]
    facts = [config.facts(), *weights, windows.sha256, accelerator.num_processes]
    work = Work(folder, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    if track is not None:
        accelerator.init_trackers("headwise-heal", config=config.facts())
    taught: Any = teacher.float()
    taught = taught.to(accelerator.device)
    pair = Pair(student, lambda: open_model(source), taught, plan, *reduced, teacher_source, codes)
    healed = heal_pair(pair, windows, config, accelerator, work, progress)
    if healed is None:
        return {}
    origin = Origin(plan, source, {"healed": healed.facts}, healed.files, codes=codes)
    report = write_model(healed.model, output, origin, command=command)
    shutil.rmtree(folder, ignore_errors=True)
    return {**report, **healed.facts, "notes": [*report["notes"], *work.notes]}


def _settled(config: HealConfig, accelerator: Accelerator, teacher: PreTrainedModel) -> HealConfig:
    """``config`` with no precision left open."""
    half = use_bf16(accelerator, config.precision, shape_of(teacher).width)
    return replace(config, precision="bf16" if half else "fp32")


def _precision(dtype: Dtype) -> Precision:
    """The precision to train in where one to run in is named."""
    if dtype == "fp16":
        raise InputError("Healing runs in fp32 or bf16: take one of these as `dtype`, or as `precision`.")
    return dtype


@contextmanager
def _taught_by(teacher: PreTrainedModel, device: torch.device) -> Generator[PreTrainedModel, None, None]:
    """``teacher`` in float32 on ``device``: itself where it is that already, and as it was afterwards; else a copy."""
    if teacher.device != device or any(parameter.dtype != torch.float32 for parameter in teacher.parameters()):
        copied: Any = copy.deepcopy(teacher)
        yield copied.float().to(device).eval()
        return
    training, learning = teacher.training, [parameter.requires_grad for parameter in teacher.parameters()]
    try:
        yield teacher.eval()
    finally:
        teacher.train(training)
        for parameter, learns in zip(teacher.parameters(), learning, strict=True):
            parameter.requires_grad_(learns)


def _check_pair(
    names: tuple[str, str], student: PreTrainedModel, teacher: PreTrainedModel, plan: Plan
) -> tuple[Collection[int], Collection[int]]:
    """Raise where these two do not belong together; else the student's layers whose attention, or MLP, was reduced."""
    before = shape_of(teacher)
    plan.check(before)
    if plan.fingerprint not in ("", fingerprint(teacher)):
        raise InputError(f"{names[0]} was not cut from {names[1]}: it has the same shape, but other weights.")
    after, kept = plan.after(before), plan.made_of()
    if len(shape_of(student).layers) != len(kept):
        raise InputError(f"{names[0]} is not what its plan.json says; heal what headwise compress wrote.")
    sizes = [getattr(model.config, "vocab_size", None) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise InputError(f"{names[0]} knows {sizes[0]} tokens and {names[1]} {sizes[1]}: not the same tokenizer.")
    parts = [{change.acts_on for i in run for change in plan.layers[i]} for run in kept]
    there = [j for j, layer in enumerate(layer for layer in after if layer is not None) if layer.heads]
    cut = [j for j in there if parts[j] & {"attention", "blocks"}]
    mlps = [j for j, part in enumerate(parts) if part & {"mlp", "blocks"}]
    return (cut if cut or mlps else there), mlps


def _check_wanted(config: HealConfig, teacher: PreTrainedModel) -> None:
    if config.next_token and not predicts_next(teacher):
        raise InputError(f"{type(teacher).__name__} predicts no next token that it could learn from the text.")
    if config.stage == "local" and not has_one_stack(teacher):
        raise InputError(f"The layers of {type(teacher).__name__} cannot learn one by one: take `stage` global.")


def _check_words(sources: tuple[str, str], student: PreTrainedModel, *, trusted: bool) -> None:
    """Raise where the tokenizers of both models are not the same."""
    if student.main_input_name != "input_ids":
        return
    words = [open_tokenizer(name, trust_remote_code=trusted).get_vocab() for name in sources]
    if words[0] != words[1]:
        raise InputError(f"{sources[0]} and {sources[1]} have different tokenizers: one cannot learn from the other.")
