"""Versioned JSON files: written whole or not at all, read with errors that say what was expected and what was found."""

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
from typing import Any, TypeVar

from headwise.records.errors import InputError

Kind = TypeVar("Kind")
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
        _tell_disk(error, temporary, path)
        raise


def _temporary(path: Path) -> Path:
    """A name beside ``path`` that nobody can guess. What processes that are gone have left of ``path`` is removed."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    prefix = f".{path.name}.{host}-"
    with suppress(OSError):
        for left in [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix)]:
            found = re.fullmatch(r"(\d+)-[0-9a-f]{16}", left.name.removeprefix(prefix))
            if found and not is_alive(int(found[1])):
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


def _tell_disk(error: BaseException, temporary: Path, path: Path) -> None:
    """Where writing ``path`` failed, name it and not its temporary one; libraries in Rust only tell in their text."""
    told = re.search(r"(?:os error|code:) (\d+)", str(error))
    if isinstance(error, OSError):
        if error.errno in FULL or error.filename is None or str(error.filename).startswith(str(temporary)):
            error.filename = str(path)
    elif isinstance(error, Exception) and told:
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """Where headwise keeps what it has made or fetched once, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


def check_free(path: Path) -> None:
    """Raise where the folder ``path`` cannot be written or would overwrite something."""
    path = path.resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists already; give another name or remove it first.")
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
    made = [parent for parent in path.parents if not parent.exists()]
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
        _tell_disk(error, temporary, path)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def write_record(path: Path, kind: str, version: int, body: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a record: its kind and version, then its fields."""
    write_text(path, record_text(kind, version, body, indent) + "\n")


def record_text(kind: str, version: int, body: Mapping[str, Any], indent: int | None = 1) -> str:
    """A record as JSON: its kind and version, then its fields."""
    return json.dumps({"headwise": kind, "version": version, **body}, indent=indent, allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an `InputError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged or not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {_kind(content)}.")
    return content


def read_record(path: Path, kind: str, version: int) -> Reader:
    """The fields of a record of ``kind``, no newer than ``version``."""
    content = read_json(path)
    found = content.get("headwise")
    if found != kind:
        was = f"a headwise {found}" if isinstance(found, str) else "some other JSON file"
        raise InputError(f"{path}: expected a headwise {kind}, found {was}.")
    written = content.get("version")
    if not isinstance(written, int) or written < 1:
        raise InputError(f"{path}: expected a version number, found {written!r}.")
    if written > version:
        raise InputError(
            f"{path} is a {kind} of version {written}; this headwise reads up to {version}: pip install -U headwise."
        )
    return Reader(content, f"{path}")


class Reader:
    """A piece of a JSON file that knows where it stands, for errors a person can act on."""

    def __init__(self, content: Any, where: str) -> None:
        self.content = content
        self.where = where

    def error(self, expected: str) -> InputError:
        """An `InputError` that points at this place."""
        return InputError(f"{self.where}: {expected}, found {_kind(self.content)}.")

    def only(self, *names: str) -> None:
        """Raise on a field that is none of ``names``: a misspelt one would be ignored silently."""
        unknown = sorted(set(self.content) - set(names)) if isinstance(self.content, dict) else []
        if unknown:
            raise InputError(f"{self.where}: unknown field {unknown[0]!r}; known are {', '.join(names)}.")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return isinstance(self.content, dict) and self.content.get(name) is not None

    def child(self, name: str) -> Reader:
        """The field ``name``, which must be there."""
        if not isinstance(self.content, dict):
            raise self.error("expected a JSON object")
        if name not in self.content:
            raise InputError(f"{self.where}: the field {name!r} is missing.")
        return Reader(self.content[name], f"{self.where}, {name}")

    def integer(self, name: str) -> int:
        """The field ``name`` as a whole number."""
        child = self.child(name)
        return child._as(int, "a whole number")

    def integers(self) -> tuple[int, ...]:
        """This list of whole numbers."""
        return tuple(item._as(int, "a whole number") for item in self.items())

    def number(self, name: str) -> float:
        """The field ``name`` as a number, whole or not."""
        child = self.child(name)
        if type(child.content) not in (int, float):
            raise child.error("expected a number")
        return child.content

    def text(self, name: str) -> str:
        """The field ``name`` as text."""
        child = self.child(name)
        return child._as(str, "text")

    def flag(self, name: str) -> bool:
        """The field ``name`` as true or false; false where it is missing."""
        return self.child(name)._as(bool, "true or false") if self.has(name) else False

    def mapping(self, name: str) -> dict[str, Any]:
        """The field ``name`` as an object; empty where it is missing."""
        return self.child(name)._as(dict, "a JSON object") if self.has(name) else {}

    def rows(self, name: str) -> list[Reader]:
        """The items of the list ``name``."""
        return self.child(name).items()

    def items(self) -> list[Reader]:
        """The items of this list."""
        content = self._as(list, "a list")
        return [Reader(item, f"{self.where} {index}") for index, item in enumerate(content)]

    def _as(self, kind: type[Kind], expected: str) -> Kind:
        if not isinstance(self.content, kind) or (kind is int and isinstance(self.content, bool)):
            raise self.error(f"expected {expected}")
        return self.content


def _kind(content: Any) -> str:
    names = {dict: "an object", list: "a list", str: f"the text {content!r}", type(None): "nothing"}
    return names.get(type(content), repr(content))
