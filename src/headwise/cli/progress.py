"""What a command says on standard error while it works: a bar where somebody watches, else a line now and then."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import typer

from headwise.files.progress import Progress, silent

FIRST_LINE = 10.0  # seconds: quick work needs no log
SECONDS_BETWEEN = 30.0  # lines of a log
ARGUMENT = re.compile(r"`([a-z]\w*)`")
_level = "normal"


def set_level(*, quiet: bool, verbose: bool) -> None:
    """How much the command that runs now says."""
    global _level  # noqa: PLW0603 - one command runs in a process
    _level = "quiet" if quiet else "verbose" if verbose else "normal"


def as_flags(sentence: str) -> str:
    """``sentence`` with the arguments it names, `keep_kv`, as a person types them here: --keep-kv."""
    return ARGUMENT.sub(lambda match: f"--{match[1].replace('_', '-')}", sentence)


def notes(sentences: Iterable[str]) -> None:
    """What a person should know."""
    if _level != "quiet":
        for sentence in sentences:
            typer.echo(f"headwise: {as_flags(sentence)}", err=True)


def announce(sentence: str) -> None:
    """What comes next, unless nobody wants to know."""
    if _level != "quiet":
        typer.echo(sentence, err=True)


@contextmanager
def watched() -> Generator[Progress, None, None]:
    """A function that shows how far the work is; of several processes only the first shows anything."""
    from rich.console import Console

    console = Console(stderr=True)
    if _level == "quiet" or os.environ.get("RANK", "0") != "0":
        yield silent
    elif console.is_terminal and _level != "verbose":
        with _bar(console) as update:
            yield update
    else:
        wait = 0.0 if _level == "verbose" else FIRST_LINE
        yield log_lines(lambda line: typer.echo(line, err=True), wait)


def log_lines(write: Callable[[str], None], wait: float, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress as lines: one where the work changes, and one every half minute; none in the first ``wait`` seconds."""
    start = clock()
    last = ("", start)

    def update(done: int, total: int, what: str) -> None:
        nonlocal last
        now = clock()
        if now - start < wait or (what == last[0] and now - last[1] < SECONDS_BETWEEN):
            return
        last = (what, now)
        write(f"headwise: {now - start:5.0f} s  {what}" + (f", {done} of {total}" if total else ""))

    return update


@contextmanager
def _bar(console: object) -> Generator[Progress, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    assert isinstance(console, Console)
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("opening", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
