"""Text to measure on: files, standard input, or the one that comes with headwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from io import BytesIO, TextIOWrapper
from pathlib import Path

from headwise.records.errors import InputError

DEFAULT_TEXT = resources.files("headwise.families") / "text" / "default.txt"


def read_texts(names: Sequence[str]) -> tuple[str, str]:
    """The text of all files of ``names`` ("-": standard input; none: headwise's own) together, and what to call it."""
    if not names:
        return DEFAULT_TEXT.read_text(encoding="utf-8"), "headwise's default text"
    called = ", ".join("standard input" if name == "-" else name for name in names)
    return "\n\n".join(read_text(name) for name in names), called


def read_text(name: str) -> str:
    """The text of one file, or of standard input for "-"; lines end in a line feed, whatever they ended in there."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return TextIOWrapper(BytesIO(raw), encoding="utf-8").read()
    except FileNotFoundError:
        raise InputError(f"There is no file {name}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as text: {error}.") from None
