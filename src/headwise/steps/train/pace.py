"""How fast shapes train, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, cast

import torch

from headwise.records.plan import Plan
from headwise.steps.train.fitting import Task
from headwise.training.fresh import fresh_model
from headwise.training.loop import optimizer_of, set_learning_rate, trainable_parameters

ROUNDS = 7
SECONDS = 1.0  # the least that a training is timed for in a round


def paces(
    trainings: Sequence[tuple[Plan, Task]], device: torch.device, rounds: int = ROUNDS, seconds: float = SECONDS
) -> list[float]:
    """Tokens per second of each training. They take turns, so that a slow minute hits all of them alike.

    The first gets its median; the others the first's, times the median over rounds of how they compare with it.
    """
    runners = [_Runner(plan, task, device) for plan, task in trainings]
    for runner in runners:
        runner.step()
    rounds_of_speeds = [[runner.speed(seconds) for runner in runners] for _ in range(rounds)]
    first = median(speeds[0] for speeds in rounds_of_speeds)
    return [first * median(speeds[i] / speeds[0] for speeds in rounds_of_speeds) for i in range(len(runners))]


class _Runner:
    """A model that trains on and on; what comes out is thrown away."""

    def __init__(self, plan: Plan, task: Task, device: torch.device) -> None:
        self.task, self.device, self.part = task, device, 0
        self.model = cast(Any, fresh_model(plan)).to(device)
        self.adam = optimizer_of(trainable_parameters(self.model), (), task.config.decay)
        set_learning_rate(self.adam, 1e-4)

    def speed(self, seconds: float) -> float:
        start, steps, passed = time.perf_counter(), 0, 0.0
        while passed < seconds:
            self.step()
            steps, passed = steps + 1, time.perf_counter() - start
        return steps * self.task.step_tokens / passed

    def step(self) -> None:
        for _ in range(self.task.config.accumulate):
            self.task.loss(self.model, self.part).backward()
            self.part += 1
        torch.nn.utils.clip_grad_norm_(trainable_parameters(self.model), 1.0)
        self.adam.step()
        self.adam.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
