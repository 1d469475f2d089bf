"""How long work says that it will still take."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the pieces of work that are done, all there are, and what is being done."""


def silent(done: int, total: int, what: str) -> None:
    """Tell nobody."""
