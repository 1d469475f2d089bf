"""Files and folders written whole or not at all, among them versioned JSON records."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headwise.files.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A temporary name that becomes ``path`` when the block ends well: a killed process leaves no half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name_target(error, temporary, path)
        raise


def _temporary(path: Path) -> Path:
    """A name beside ``path`` that nobody can guess. What processes that are gone have left of ``path`` is removed."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    prefix = f".{path.name}.{host}-"
    with suppress(OSError):
        for left in [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix)]:
            owner = re.fullmatch(r"(\d+)-[0-9a-f]{16}", left.name.removeprefix(prefix))
            if owner and not is_alive(int(owner[1])):
                _remove(left)
    return path.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(8)}")


def is_alive(process: Any) -> bool:
    """Whether a process of this machine with the number ``process`` is running."""
    if os.name != "posix" or not isinstance(process, int) or process < 1:
        return True  # nobody can tell
    try:
        with suppress(PermissionError):  # somebody else's
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a file or a folder; of a link only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _name_target(error: BaseException, temporary: Path, path: Path) -> None:
    """Let an error of writing ``path`` name it, not its temporary one; Rust libraries hide the number in their text."""
    number = re.search(r"(?:os error|code:) (\d+)", str(error))
    if isinstance(error, OSError):
        if error.errno in FULL or error.filename is None or str(error.filename).startswith(str(temporary)):
            error.filename = str(path)
    elif isinstance(error, Exception) and number:
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """The folder in the user's cache for files that headwise converts or fetches once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


def check_free(path: Path) -> None:
    """Raise where the folder ``path`` cannot be written or would overwrite something."""
    path = path.resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; give another name or remove it first.")
    check_writable(path)


def check_file(path: Path) -> None:
    """Raise where no file can be written at ``path``."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file.")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise where nothing can be written at ``path``."""
    path = path.resolve()
    nearest = next(parent for parent in path.parents if parent.exists())
    if not nearest.is_dir():
        raise InputError(f"{path} cannot be written: {nearest} is not a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


@contextmanager
def new_folder(path: Path) -> Generator[Path, None, None]:
    """A temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not."""
    path = path.resolve()
    check_free(path)
    new_parents = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)  # some writers keep their files to the owner alone
        if path.exists():
            path.rmdir()
        temporary.replace(path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _name_target(error, temporary, path)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        raise


def write_record(path: Path, kind: str, version: int, body: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a record: its kind and version, then its fields."""
    write_text(path, record_text(kind, version, body, indent) + "\n")


def record_text(kind: str, version: int, body: Mapping[str, Any], indent: int | None = 1) -> str:
    """A record as JSON: its kind and version, then its fields."""
    return json.dumps({"headwise": kind, "version": version, **body}, indent=indent, allow_nan=False)
