"""The processes of a training run, and the precision they compute in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list

from headwise.files.errors import InputError
from headwise.records.settings import Precision
from headwise.tracing.placement import device_named

NARROW = 256  # models of less width lose as much by converting numbers as bf16 gains on a CPU
T = TypeVar("T")
WAITING = timedelta(days=7)  # the first process may have long work of its own


def join_processes(track: str | None = None, logs: Path | None = None, device: str = "auto") -> Accelerator:
    """This process as one of those ``torchrun`` has started, or alone.

    ``track`` names one of Accelerate's trackers; those that write files do so in ``logs``. On which ``device`` is
    Accelerate's to say, unless one is named; of several processes each has its own.
    """
    if device != "auto" and device_named(device).index is not None:
        torch.cuda.set_device(device)
    on_cpu = not torch.cuda.is_available() or device.startswith("cpu")
    waiting = InitProcessGroupKwargs(timeout=WAITING)
    where = ProjectConfiguration() if logs is None else ProjectConfiguration(str(logs))
    try:
        accelerator = Accelerator(cpu=on_cpu, log_with=track, project_config=where, kwargs_handlers=[waiting])
    except ValueError as error:
        raise InputError(f"{track} is not a tracker that Accelerate knows.") from error
    if track is not None and not accelerator.log_with:
        raise InputError(f"The tracker {track} is not installed here.")
    return accelerator


@contextmanager
def shared_folder(accelerator: Accelerator) -> Generator[Path, None, None]:
    """A folder that all processes of this machine use while the block lasts; the first makes and removes it."""
    with tempfile.TemporaryDirectory(prefix="headwise-") if accelerator.is_main_process else nullcontext("") as own:
        (name,) = broadcast_object_list([own])
        yield Path(name)


def first_then_all(accelerator: Accelerator, make: Callable[[], T]) -> T:
    """What ``make`` returns, in the first process before the others; of an `InputError` only the first reports."""
    result, errors = None, [None]
    if accelerator.is_main_process:
        try:
            result = make()
        except InputError as error:
            errors = [str(error)]
    (message,) = broadcast_object_list(errors)
    if message is None:
        return make() if result is None else result
    if accelerator.is_main_process:
        raise InputError(message)
    raise SystemExit(2)


def use_bf16(accelerator: Accelerator, precision: Precision, width: int) -> bool:
    """Whether to train a model of ``width`` in bf16; "auto": as suits the machine of the first process."""
    if precision != "auto":
        return precision == "bf16"
    return broadcast_object_list([bf16_suits(accelerator.device, width)])[0]


def bf16_suits(device: torch.device, width: int) -> bool:
    """Whether ``device`` computes in bf16 natively, and ``width`` is enough to gain by it.

    Decided by what the machine is, never by a stopwatch: the same command comes to the same weights again.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and native and width >= NARROW
