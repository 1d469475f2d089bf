"""Hashes of file contents, by which changed inputs and outputs are noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """The SHA-256 of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents_of(path: Path) -> dict[str, str]:
    """The hash of a file, or of every file in a folder, by its name below the folder of ``path``.

    Names that begin with a dot (locks, what a desktop leaves behind) are no part of what a folder holds.
    """
    if not path.is_dir():
        return {path.name: sha256_of(path)} if path.exists() else {}
    hashes = {}
    for each in sorted(path.rglob("*")):
        inside = each.relative_to(path.parent)
        if each.is_file() and not any(part.startswith(".") for part in inside.parts[1:]):
            hashes[inside.as_posix()] = sha256_of(each)
    return hashes
