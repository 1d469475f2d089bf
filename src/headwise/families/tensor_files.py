"""Tensors in a file with a few facts about them: written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.records.files import replacing


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
