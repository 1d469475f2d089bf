"""The processes of a training run, and in what numbers they compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list

from headwise.records.files import write_text

FILE = "precision"
FASTER = 1.2  # half precision is taken where it is so much faster
Precision = Literal["auto", "fp32", "bf16"]
WAITING = timedelta(days=7)  # the first process may have long work of its own


def join_processes(folder: Path, track: str | None = None) -> Accelerator:
    """This process as one of those ``torchrun`` has started, or alone; ``track`` names one of Accelerate's trackers."""
    waiting = InitProcessGroupKwargs(timeout=WAITING)
    return Accelerator(cpu=not torch.cuda.is_available(), log_with=track, project_dir=folder, kwargs_handlers=[waiting])


def in_half(accelerator: Accelerator, precision: Precision, folder: Path, faster: Callable[[], bool]) -> bool:
    """Whether to train in half precision; "auto": if it is ``faster``, asked once for ``folder`` and its reruns."""
    if precision != "auto":
        return precision == "bf16"
    file, answer = folder / FILE, [False]
    if accelerator.is_main_process:
        if not file.exists():
            write_text(file, "bf16" if faster() else "fp32")
        answer = [file.read_text(encoding="utf-8") == "bf16"]
    return broadcast_object_list(answer)[0]


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
