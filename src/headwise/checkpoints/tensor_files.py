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
Contents = tuple[dict[str, str], dict[str, Tensor]]
Kinds = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # names, types and shapes


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all; ``facts`` hold the ``inputs_hash`` of what it was computed from."""
    with replacing(path) as temporary:
        metadata = json.dumps({**facts, SEAL: _seal(facts, tensors)})
        save_file(tensors, temporary, {FACTS: metadata})  # one entry: several come out in another order every time


def open_tensors(path: Path, *, sealed: bool = False) -> Contents:
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


def read_tensors(path: Path, inputs_hash: str) -> Contents | None:
    """Facts and tensors; nothing where there is no file, or a damaged or changed one, or one of something else."""
    try:
        contents = open_tensors(path, sealed=True)
    except InputError:
        return None
    return contents if contents[0].get("inputs_hash") == inputs_hash else None


def check_tensors(tensors: Mapping[str, Tensor], expected: Kinds, where: str) -> None:
    """Raise where ``tensors`` are not exactly those ``expected``, or are not finite."""
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise InputError(f"{where} lacks {len(missing)} tensors, {missing[0]} among them.")
    if extra:
        raise InputError(f"{where} holds {len(extra)} tensors that do not belong there, {extra[0]} among them.")
    for name, (kind, shape) in expected.items():
        tensor = tensors[name]
        if (tensor.dtype, tuple(tensor.shape)) != (kind, tuple(shape)):
            raise InputError(
                f"{where}: expected {name} as {kind} of shape {tuple(shape)}, found {tensor.dtype} of "
                f"{tuple(tensor.shape)}."
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"{where}: some numbers in {name} are NaN or infinite.")


def _facts(metadata: Mapping[str, str]) -> dict[str, str]:
    """The facts in the metadata of a file; earlier versions wrote one entry for each fact."""
    if FACTS not in metadata:
        return dict(metadata)
    try:
        facts = parse_json(metadata[FACTS].encode(), FACTS)
    except InputError:
        facts = {}
    return facts if isinstance(facts, dict) else {}


def _seal(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of facts, and of names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
