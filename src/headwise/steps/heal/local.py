"""Healing layer by layer: each attention, then each MLP, learns what the stream was behind it in the dense model.

It learns on the inputs it really gets, behind layers that have learnt already. No gradient leaves the layer, so this is
cheap: the papers' fine-tuning of student heads, for all heads of a layer at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.families.mlp import mlp_of
from headwise.families.sites import Site, sites_of
from headwise.files.errors import Failed
from headwise.files.progress import Progress
from headwise.records.healing import HealConfig
from headwise.records.plan import Plan, runs
from headwise.runtime.cache import CacheSpec
from headwise.tracing.rounding import rounding
from headwise.tracing.stream import Stream
from headwise.training.loop import optimizer_of, put_weights, rms_of, set_learning_rate, trained_weights
from headwise.training.work import Work

STAGE = "local"
STEP = 256  # tokens, at least one window
ROUNDS = 8  # through all windows, for each layer
SHORT = 512  # tokens, up to which plain products learn faster than fused attention in half precision on a CPU
SECONDS_BETWEEN = 15.0


def heal_locally(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    plan: Plan,
    codes: CacheSpec | None,
    batches: Sequence[dict[str, Tensor]],
    config: HealConfig,
    half: bool,
    work: Work,
    progress: Progress,
) -> None:
    """Train attention and MLPs of ``student`` (what of it asks for gradients), one layer after the other."""
    done, weights = work.load(STAGE)
    work.forget_after(STAGE, done)
    if weights:
        put_weights(student, weights)
    device, ids = student.device.type, batches[0].get("input_ids")
    plain = half and device == "cpu" and ids is not None and ids.shape[1] <= SHORT
    with (
        _plain_attention(student) if plain else nullcontext(),
        rounding(student, codes),
        torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=False),  # weights change
    ):
        _one_by_one(teacher, student, plan, batches, config, work, done, progress)
    if done < len(plan.layers):
        work.save(STAGE, len(plan.layers), trained_weights(student))


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Generator[None, None, None]:
    before = model.config._attn_implementation or "sdpa"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _one_by_one(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    plan: Plan,
    batches: Sequence[dict[str, Tensor]],
    config: HealConfig,
    work: Work,
    done: int,
    progress: Progress,
) -> None:
    """Run both models layer by layer, and train what comes after the first ``done`` layers."""
    with torch.no_grad():
        before, now = Stream(teacher, batches), Stream(student, batches)
    saved = time.monotonic()
    students = {run[0]: (j, own) for j, (run, own) in enumerate(zip(plan.made_of(), sites_of(student), strict=True))}
    teachers = sites_of(teacher)
    for run in runs(plan.layers):
        i, behind = run[0], run[-1] + 1
        progress(i, len(plan.layers), "healing layer by layer")
        entered, added = before.hidden, [torch.zeros(()) for _ in batches]
        for number in run:  # blocks that became one learn what all of them added, then what came out of the last
            with torch.no_grad():
                both = [before.run_watched(teachers[number].out, number, n) for n in range(len(batches))]
                before.hidden = [out for out, _ in both]
                added = [total + own for total, (_, own) in zip(added, both, strict=True)]
        if i in students:
            j, own = students[i]
            if i >= done:
                wanted = added
                if not teachers[i].stack.norm_behind:
                    wanted = [stream + total for stream, total in zip(entered, added, strict=True)]
                tasks = ("attention", _attention(now, own, j, wanted)), ("mlp", _mlp(now, own, j, before.hidden))
                for part, task in tasks:
                    error = _train(task, [batch.get("attention_mask") for batch in batches], config)
                    if error is not None and not math.isfinite(error[1]):
                        raise Failed(
                            f"The error of layer {i} is not a number. The weights of the start stay in {work.folder}. "
                            "A lower learning rate of single layers may help."
                        )
                    if error is not None:
                        work.log(
                            stage=STAGE, step=i + 1, layer=i, part=part, error_before=error[0], error_after=error[1]
                        )
            with torch.no_grad():
                now.hidden = [now.run(j, n) for n in range(len(batches))]
        if i >= done and time.monotonic() - saved > SECONDS_BETWEEN:
            work.save(STAGE, behind, trained_weights(student))
            saved = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Task:
    """What learns, what it is to reach for each batch, and what it does ``reach``; gradients stay in ``block``."""

    modules: Sequence[nn.Module]
    block: nn.Module
    wanted: Sequence[Tensor]
    reach: Callable[[int], Tensor]


def _attention(now: Stream, site: Site, block: int, wanted: Sequence[Tensor]) -> _Task:
    """The attention of a block learns the stream behind it, or what it adds where a norm stands in between."""

    def reach(n: int) -> Tensor:
        added = now.run_through(site.out, block, n)
        return added if site.stack.norm_behind else now.hidden[n] + added

    return _Task((site.module, site.out), now.blocks[block], wanted, reach)


def _mlp(now: Stream, site: Site, block: int, wanted: Sequence[Tensor]) -> _Task:
    """The MLP of a block learns the stream behind the block."""
    mlp = mlp_of(site)
    return _Task([] if mlp is None else mlp.projections, now.blocks[block], wanted, lambda n: now.run(block, n))


def _train(task: _Task, masks: Sequence[Tensor | None], config: HealConfig) -> tuple[float, float] | None:
    """Fit one part of a block; the mean error of the first and of the last round, None where nothing in it learns."""
    wanted = task.wanted
    parameters = list({id(p): p for module in task.modules for p in module.parameters() if p.requires_grad}.values())
    if not parameters:
        return None
    adam = optimizer_of(parameters, rms_of(parameters))
    steps, errors = ROUNDS * len(wanted), []
    for step in range(steps):
        n = step % len(wanted)
        set_learning_rate(adam, config.local_speed * (1 + math.cos(math.pi * step / steps)) / 2)
        reached = task.reach(n).float()
        energy = wanted[n].float().square().sum(-1).clamp(min=torch.finfo(reached.dtype).tiny)
        errors_BT, mask = (reached - wanted[n]).square().sum(-1) / energy, masks[n]
        error = errors_BT.mean() if mask is None else errors_BT[mask.to(errors_BT.device) > 0].mean()
        error.backward()
        adam.step()
        task.block.zero_grad()
        errors.append(error.item())
    half = len(wanted)
    return sum(errors[:half]) / half, sum(errors[-half:]) / half
