"""Pages out of their templates: styles and code are inside, nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from importlib.metadata import version


def filled(kind: str, parts: Mapping[str, str], code: Sequence[str] = ()) -> str:
    """The page of a ``kind``: its template within the frame of all pages, in the common style, light or dark.

    ``code`` names files with code that only this page needs.
    """
    folder = resources.files(__package__ or "")
    files = ("frame.html", f"{kind}.html", "page.css", "theme.js", *code)
    frame, main, style, *scripts = ((folder / file).read_text(encoding="utf-8") for file in files)
    parts = {**parts, "KIND": kind, "VERSION": version("headwise"), "STYLE": style, "CODE": "".join(scripts)}
    parts["MAIN"] = _fill(main, parts)
    return _fill(frame, parts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()) -> str:
    """Head and body of a table whose rows begin with a name; ``chosen`` rows stand out."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    marks = [' class="chosen"' if mark else "" for mark in chosen or [False] * len(rows)]
    body = "".join(
        f'<tr{mark}><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for mark, (name, *cells) in zip(marks, rows, strict=True)
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _fill(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], template)
