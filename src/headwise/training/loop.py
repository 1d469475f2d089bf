"""The loop: AdamW with warm-up and cosine, checkpoints, and the best weights by held-out score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from headwise.files.errors import Failed
from headwise.files.progress import Progress, silent
from headwise.training.work import Work

STAGE = "global"
FRESH = 0.02
TRAINED = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
MOMENTS = StateDictOptions(full_state_dict=True, cpu_offload=True)
BACK = StateDictOptions(full_state_dict=True, strict=False)
Loss = Callable[[nn.Module, int], Tensor]
Judge = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps and learning rate. ``every``: steps between two evaluations, each followed by a checkpoint."""

    steps: int
    rate: float
    every: int
    tokens: int  # of one step, in all processes
    accumulate: int = 1
    clip: float = 1.0
    decay: float = 0.0
    warm_up: float = 0.05

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then a cosine down to zero."""
        warm = max(1, round(self.warm_up * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    schedule: Schedule,
    loss: Loss,
    judge: Judge,
    work: Work,
    progress: Progress = silent,
    units: Sequence[float] = (),
) -> None:
    """Train what requires gradients in ``model``. ``loss`` takes the model and the number of a micro-batch.

    With ``units``, one for each such parameter, learning rates are in these. ``judge`` gives scores on held-out data:
    the first decides which weights are the best; ``work`` keeps those.
    """
    adam = optimizer_of(trainable_parameters(model), units, schedule.decay)
    wrapped, optimizer = accelerator.prepare(model, adam)
    done = _resume(wrapped, adam, work, accelerator)
    started, held = time.monotonic(), {}
    for step in range(done, schedule.steps):
        set_learning_rate(adam, schedule.learning_rate_at(step))
        value = _backward(accelerator, wrapped, schedule, loss, step)
        _check_finite(value, "loss", step + 1, work)
        accelerator.clip_grad_norm_(trainable_parameters(wrapped), schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        speed = (step + 1 - done) * schedule.tokens / (time.monotonic() - started)
        facts = {"loss": round(value, 6), "rate": schedule.learning_rate_at(step), "tokens_per_second": round(speed, 1)}
        tokens = (step + 1) * schedule.tokens
        accelerator.log(facts, step=step + 1)
        if accelerator.is_main_process:
            work.log(stage=STAGE, step=step + 1, tokens=tokens, **facts)
        if (step + 1) % schedule.every == 0 or step + 1 == schedule.steps:
            held = score_weights(accelerator, wrapped, judge, work, STAGE, step + 1, tokens)
            _checkpoint(accelerator, wrapped, adam, work, step + 1)
        scores = "".join(f", held-out {name} {score:.4g}" for name, score in held.items())
        progress(step + 1, schedule.steps, f"loss {value:.4f}{scores}, {speed:.0f} tokens/s")


def optimizer_of(parameters: list[nn.Parameter], units: Sequence[float], decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW; with ``units`` each parameter has its own learning rate. Norms and biases do not decay, matrices do."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "unit": 1.0}, {"params": vectors, "unit": 1.0}]
    if units:
        groups = [{"params": [p], "unit": unit} for p, unit in zip(parameters, units, strict=True)]
    for group in groups:
        group["weight_decay"] = decay if group["params"] and group["params"][0].ndim > 1 else 0.0
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of an optimizer of `optimizer_of`, in the units of each parameter."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["unit"]


def rms_of(parameters: list[nn.Parameter]) -> list[float]:
    """Root mean square of each parameter, as units of its learning rate; for one of zeros that of a fresh matrix."""
    return [parameter.detach().float().square().mean().sqrt().item() or FRESH for parameter in parameters]


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, unsharded and on the CPU, by name; tied weights by one of their names."""
    state = cast(dict[str, Tensor], get_model_state_dict(model, options=TRAINED))
    names: dict[int, str] = {}
    for name, tensor in state.items():
        names.setdefault(tensor.data_ptr(), name)
    return {name: state[name] for name in names.values()}


def put_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights of `trained_weights` back into ``model``."""
    set_model_state_dict(model, cast(Any, weights), options=BACK)


def _backward(accelerator: Accelerator, wrapped: nn.Module, schedule: Schedule, loss: Loss, step: int) -> float:
    """Accumulated gradients of one step, averaged over processes; returns the mean loss."""
    total = torch.zeros((), device=accelerator.device)
    for part in range(schedule.accumulate):
        last = part == schedule.accumulate - 1
        with nullcontext() if last else accelerator.no_sync(wrapped):
            value = loss(wrapped, step * schedule.accumulate + part) / schedule.accumulate
            accelerator.backward(value)
        total += value.detach()
    reduced: Tensor = accelerator.reduce(total, "mean")
    return reduced.item()


def score_weights(
    accelerator: Accelerator, model: nn.Module, judge: Judge, work: Work, stage: str, step: int, tokens: int
) -> dict[str, float]:
    """Evaluate the current weights, log the scores, and keep the weights if they are the best so far."""
    scores = judge(model)
    for name, score in scores.items():
        _check_finite(score, f"held-out {name}", step, work)
    weights = trained_weights(model)
    accelerator.log({f"held_out_{name}": value for name, value in scores.items()}, step=step)
    if accelerator.is_main_process:
        work.offer(stage, step, next(iter(scores.values())), weights)
        work.log(stage=stage, step=step, tokens=tokens, scores=scores)
    accelerator.wait_for_everyone()
    return scores


def _check_finite(value: float, name: str, step: int, work: Work) -> None:
    if not math.isfinite(value):
        best = work.best()
        kept = "" if best is None else f" The best weights so far ({best.stage} {best.step}) stay in {work.folder}."
        raise Failed(f"The {name} is not a number at step {step}.{kept} A lower learning rate may help.")


def _checkpoint(
    accelerator: Accelerator, wrapped: nn.Module, adam: torch.optim.Optimizer, work: Work, step: int
) -> None:
    tensors = {f"model {name}": tensor for name, tensor in trained_weights(wrapped).items()}
    state = get_optimizer_state_dict(wrapped, adam, options=MOMENTS)
    for name, moments in cast(Any, state.get("state", {})).items():  # all are gathered in the first process
        tensors |= {f"{key} {name}": value for key, value in moments.items()}
    if accelerator.is_main_process:
        work.save(STAGE, step, tensors)
    accelerator.wait_for_everyone()


def _resume(wrapped: nn.Module, adam: torch.optim.Optimizer, work: Work, accelerator: Accelerator) -> int:
    """Load weights and optimizer moments of the last checkpoint; returns the steps done until then."""
    step, tensors = work.load(STAGE)
    if accelerator.is_main_process:
        work.forget_after(STAGE, step)
    accelerator.wait_for_everyone()
    if not step:
        return 0
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model ")}
    put_weights(wrapped, {name.removeprefix("model "): tensor for name, tensor in weights.items()})
    state = cast(Any, get_optimizer_state_dict(wrapped, adam))
    state["state"] = {  # not changed in place: those are the optimizer's own
        name: {key: tensors[f"{key} {name}"] for key in moments} for name, moments in state["state"].items()
    }
    set_optimizer_state_dict(wrapped, adam, state, options=BACK)
    return step
