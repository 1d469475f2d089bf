"""How records show themselves: `print` gives a table, a notebook the same as HTML. Who draws them is said outside."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_drawn_by: list[str] = []  # the module with `text_of` and `html_of`; records know none themselves


def draw_by(module: str) -> None:
    """Let ``module`` draw records; it is imported when the first one is shown."""
    _drawn_by[:] = [module]


class Shown:
    """A record that prints as a table. `repr` stays what it is."""

    __slots__ = ()

    def __str__(self) -> str:
        return _drawing("text_of", self) if _drawn_by else repr(self)

    def _repr_html_(self) -> str | None:
        return _drawing("html_of", self) if _drawn_by else None


def _drawing(function: str, record: Any) -> str:
    return getattr(import_module(_drawn_by[0]), function)(record)
