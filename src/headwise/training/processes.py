"""The processes of a training run, and in what numbers they compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list

from headwise.records.errors import InputError
from headwise.records.files import write_text
from headwise.records.training import Precision
from headwise.training.work import Work

FASTER = 1.2  # half precision is taken where it is so much faster
T = TypeVar("T")
WAITING = timedelta(days=7)  # the first process may have long work of its own


def join_processes(track: str | None = None, logs: Path | None = None) -> Accelerator:
    """This process as one of those ``torchrun`` has started, or alone.

    ``track`` names one of Accelerate's trackers; those that write files do so in ``logs``.
    """
    waiting = InitProcessGroupKwargs(timeout=WAITING)
    where = ProjectConfiguration() if logs is None else ProjectConfiguration(str(logs))
    try:
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), log_with=track, project_config=where, kwargs_handlers=[waiting]
        )
    except ValueError as error:
        raise InputError(f"{track} is not a tracker that Accelerate knows.") from error
    if track is not None and not accelerator.log_with:
        raise InputError(f"The tracker {track} is not installed here.")
    return accelerator


def first_then_all(accelerator: Accelerator, make: Callable[[], T]) -> T:
    """What ``make`` gives, in the first process before the others; if its input is wrong, only the first says so."""
    found, wrong = None, [None]
    if accelerator.is_main_process:
        try:
            found = make()
        except InputError as error:
            wrong = [str(error)]
    (told,) = broadcast_object_list(wrong)
    if told is None:
        return make() if found is None else found
    if accelerator.is_main_process:
        raise InputError(told)
    raise SystemExit(2)


def in_half(accelerator: Accelerator, precision: Precision, work: Work, faster: Callable[[], bool]) -> bool:
    """Whether to train in half precision; "auto": if it is ``faster``, asked once for ``work`` and its reruns."""
    if precision != "auto":
        return precision == "bf16"
    answer = [""]
    if accelerator.is_main_process:
        file = work.folder / f"precision-{work.inputs_hash[:8]}"
        if not file.exists():
            write_text(file, "bf16" if faster() else "fp32")
        answer = [file.read_text(encoding="utf-8", errors="replace")]
        if answer[0] not in ("bf16", "fp32"):
            raise InputError(f"{file}: expected bf16 or fp32, found {answer[0][:20]!r}; remove it.")
    return broadcast_object_list(answer)[0] == "bf16"


def products_faster_in_half(width: int, device: torch.device) -> bool:
    """Time a layer's worth of matrix products both ways."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    x, weight = torch.randn(512, width, device=device), torch.randn(4 * width, width, device=device)
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype), weight.to(dtype)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            a @ b.T
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return seconds[0] > FASTER * seconds[1]
