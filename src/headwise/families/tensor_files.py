"""Tensors in a file with a few facts about them: written whole or not at all, and sealed by a hash of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.records.errors import InputError
from headwise.records.files import replacing

SEAL = "sha256"
Found = tuple[dict[str, str], dict[str, Tensor]]


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; ``facts`` hold an ``inputs_hash``: what it was made from."""
    with replacing(path) as temporary:
        save_file(tensors, temporary, {**facts, SEAL: _seal(facts, tensors)})


def open_tensors(path: Path) -> Found:
    """Facts and tensors of a file, or an `InputError` where it is damaged or was changed since it was written.

    Files of earlier versions, and of other programs, have no seal and are taken as they are.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}.") from None
    sealed = facts.pop(SEAL, None)
    if sealed is not None and sealed != _seal(facts, tensors):
        raise InputError(f"{path} was changed since headwise wrote it.")
    return facts, tensors


def read_tensors(path: Path, inputs_hash: str) -> Found | None:
    """Facts and tensors; nothing where there is no file, or a damaged or changed one, or one of something else."""
    try:
        found = open_tensors(path)
    except InputError:
        return None
    return found if found[0].get("inputs_hash") == inputs_hash else None


def _seal(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of facts, and of names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
