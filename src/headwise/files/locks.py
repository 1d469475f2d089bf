"""One writer at a time: a folder that is being written is locked, and an error names the process that holds it."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from headwise.files.errors import InputError
from headwise.files.reading import parse_json
from headwise.files.writing import check_writable, is_alive

P = ParamSpec("P")
R = TypeVar("R")
DAY = 86400
LONGEST = 4096  # bytes of a note that are read
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # as some network drives answer
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_held: ContextVar[frozenset[Path]] = ContextVar("folders this thread has locked", default=frozenset())


@contextmanager
def locked(folder: Path, what: str) -> Generator[None, None, None]:
    """Keep all others from writing ``folder`` until the block ends; `InputError` where somebody is at it already.

    ``what`` stands in the error of those who come second. Steps that use other steps may lock a folder twice. Of the
    processes that ``torchrun`` starts the first takes the lock for all. A process that ends loses its locks.
    """
    folder = folder.resolve()
    if folder in _held.get() or not _first_process():
        yield
        return
    check_writable(folder / "file" if folder.is_dir() else folder)
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, which may have to be absent or empty; inside only where nothing can be written beside it.
    beside = not folder.is_dir() or os.access(folder.parent, os.W_OK | os.X_OK)
    path = folder.parent / f".{folder.name}.lock" if beside else folder / ".lock"
    try:
        descriptor = _take(path, folder, what)
        before = _held.set(_held.get() | {folder})
        try:
            yield
        finally:
            _held.reset(before)
            with suppress(OSError):
                path.unlink()  # while it is still ours: nobody else's can be meant
            os.close(descriptor)
    finally:
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()


def locking(argument: str, what: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a step run with the folder that is its ``argument`` `locked`; by default it is called by its name."""

    def around(step: Callable[P, R]) -> Callable[P, R]:
        parameters, name = signature(step), what or step.__name__

        @functools.wraps(step)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with locked(Path(parameters.bind(*args, **kwargs).arguments[argument]), name):
                return step(*args, **kwargs)

        return run

    return around


def _first_process() -> bool:
    return os.environ.get("WORLD_SIZE", "") in ("", "1") or os.environ.get("RANK", "0") == "0"


def _take(path: Path, folder: Path, what: str) -> int:
    """The descriptor of the lock file, which is locked as long as that is open."""
    note = {"pid": os.getpid(), "host": platform.node(), "what": what, "since": time.time()}
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if not _lock(descriptor):
                raise InputError(f"{folder} is being written by {_who(_read(descriptor))}.")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(note).encode(), 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one who had it has just removed the file: begin again


def _lock(descriptor: int) -> bool:
    """Whether the lock is ours now; where the system has no locks, a note of a living process counts as one."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    note = _read(descriptor)
    return not note or (note.get("host") == platform.node() and not is_alive(note.get("pid")))


def _read(descriptor: int) -> Mapping[str, Any]:
    try:
        note = parse_json(os.pread(descriptor, LONGEST, 0), "lock")
    except InputError:
        return {}  # taken this very moment
    return note if isinstance(note, dict) else {}


def _who(note: Mapping[str, Any]) -> str:
    advice = "wait for it or give another folder"
    try:
        where = "" if note["host"] == platform.node() else f" on {note['host']}"
        began = time.localtime(note["since"])
        since = time.strftime("%H:%M" if time.time() - note["since"] < DAY else "%Y-%m-%d %H:%M", began)
        return f"process {note['pid']}{where} (headwise {note['what']}) since {since}; {advice}"
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return f"another process; {advice}"
