"""Where and in which precision a model runs, and how it is put back as it was."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from headwise.files.errors import InputError
from headwise.records.settings import OpenConfig

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_named(name: str) -> torch.device:
    """The device called ``name`` ("auto": a GPU if there is one), or an `InputError` where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"There is no device {name!r} here; `device` may be auto or {', '.join(_there())}.") from None
    return device


def place(model: PreTrainedModel, opening: OpenConfig | None = None) -> PreTrainedModel:
    """``model`` on the device and in the precision that are asked for; without ``opening`` on the device it is on.

    In half precision a CPU is slow, so that "auto" means float32 there, and what the model is in elsewhere.
    """
    device = model.device if opening is None else device_named(opening.device)
    wanted = "auto" if opening is None else opening.dtype
    if device.type != model.device.type or (device.index is not None and device != model.device):
        cast(Any, model).to(device)
    if wanted == "auto" and device.type == "cpu":
        wanted = "fp32"
    if wanted == "fp32":
        model.float()
    elif wanted != "auto":
        for parameter in model.parameters():  # buffers stay: frequencies of RoPE need their digits
            parameter.data = parameter.data.to(PRECISIONS[wanted])
    return model


@contextmanager
def evaluating(model: PreTrainedModel) -> Generator[PreTrainedModel, None, None]:
    """``model`` in evaluation mode; when the block ends, every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield model.eval()
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def as_it_was(model: PreTrainedModel) -> Generator[PreTrainedModel, None, None]:
    """``model`` in evaluation mode, which may be placed elsewhere: afterwards all its tensors and modes are as before.

    What is written into its tensors stays written.
    """
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    contents = [
        (parameter, parameter.data, parameter.grad, parameter.requires_grad) for parameter in model.parameters()
    ]
    for parameter, *_ in contents:
        parameter.grad = None  # of another precision it could not stay
    try:
        with evaluating(model):
            yield model
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for parameter, data, gradient, trainable in contents:
            parameter.data, parameter.grad = data, gradient
            parameter.requires_grad_(trainable)


@contextmanager
def running(model: PreTrainedModel, opening: OpenConfig | None = None) -> Generator[PreTrainedModel, None, None]:
    """``model`` in evaluation mode and placed as asked for; when the block ends, it is as it was."""
    with as_it_was(model):
        yield place(model, opening)


def _there() -> list[str]:
    graphics = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *graphics, *(["mps"] if torch.backends.mps.is_available() else [])]
