"""Tensors in a file with a few facts about them: written whole or not at all, and sealed by a hash of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.files.errors import InputError
from headwise.files.reading import parse_json
from headwise.files.writing import replacing

FACTS, SEAL = "facts", "sha256"
Found = tuple[dict[str, str], dict[str, Tensor]]
Kinds = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # names, types and shapes


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; ``facts`` hold an ``inputs_hash``: what it was made from."""
    with replacing(path) as temporary:
        told = json.dumps({**facts, SEAL: _seal(facts, tensors)})
        save_file(tensors, temporary, {FACTS: told})  # one entry: several come out in another order every time


def open_tensors(path: Path, *, sealed: bool = False) -> Found:
    """Facts and tensors of a file, or an `InputError` where it is damaged or was changed since it was written.

    Files of earlier versions have no seal and are taken as they are, unless only a ``sealed`` one will do.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = _facts(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is damaged: {error}.") from None
    seal = facts.pop(SEAL, None)
    if (sealed or seal is not None) and seal != _seal(facts, tensors):
        raise InputError(f"{path} was changed since headwise wrote it.")
    return facts, tensors


def read_tensors(path: Path, inputs_hash: str) -> Found | None:
    """Facts and tensors; nothing where there is no file, or a damaged or changed one, or one of something else."""
    try:
        found = open_tensors(path, sealed=True)
    except InputError:
        return None
    return found if found[0].get("inputs_hash") == inputs_hash else None


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


def _facts(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a file says of its tensors; earlier versions wrote one entry for each fact."""
    if FACTS not in metadata:
        return dict(metadata)
    try:
        found = parse_json(metadata[FACTS].encode(), FACTS)
    except InputError:
        found = {}
    return found if isinstance(found, dict) else {}


def _seal(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of facts, and of names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
