"""Tensors in a file with a few facts about them: written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, dtype

from headwise.records.errors import InputError
from headwise.records.files import replacing

Kinds = Mapping[str, tuple[dtype, Sequence[int]]]  # names, types and shapes


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; ``facts`` hold an ``inputs_hash``: what it was made from."""
    with replacing(path) as temporary:
        save_file(tensors, temporary, facts)


def read_tensors(path: Path, inputs_hash: str) -> tuple[dict[str, str], dict[str, Tensor]] | None:
    """Facts and tensors; nothing where there is no file, or a damaged one, or one made from something else."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if facts.get("inputs_hash") != inputs_hash:
                return None
            return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        return None


def open_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Facts and tensors of a file, or an `InputError` where it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None


def kinds_of(tensors: Mapping[str, Tensor]) -> Kinds:
    """Names, types and shapes of ``tensors``."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def check_tensors(tensors: Mapping[str, Tensor], wanted: Kinds, where: str) -> None:
    """Raise where ``tensors`` are not exactly those ``wanted``, or hold what is no finite number."""
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise InputError(f"{where} lacks {len(missing)} tensors, {missing[0]} among them.")
    if extra:
        raise InputError(f"{where} holds {len(extra)} tensors that do not belong there, {extra[0]} among them.")
    for name, (kind, shape) in wanted.items():
        found = tensors[name]
        if (found.dtype, tuple(found.shape)) != (kind, tuple(shape)):
            raise InputError(
                f"{where}: expected {name} as {kind} of shape {tuple(shape)}, found {found.dtype} of "
                f"{tuple(found.shape)}."
            )
        if found.is_floating_point() and not found.isfinite().all():
            raise InputError(f"{where}: some numbers in {name} are NaN or infinite.")
