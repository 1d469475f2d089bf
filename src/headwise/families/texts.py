"""Text to measure on: files, standard input, or the one that comes with headwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import resources
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TextIO

from headwise.records.errors import InputError

TEXTS = resources.files("headwise.families") / "text"
DEFAULT_TEXT, EVALUATION_TEXT = TEXTS / "default.txt", TEXTS / "evaluation.txt"


def read_texts(names: Sequence[str], *, evaluation: bool = False) -> tuple[str, str]:
    """The text of all files of ``names`` ("-": standard input) together, and what to call it.

    Without names it is one of headwise's own: what is for ``evaluation`` is not in what is measured or healed on.
    """
    if not names:
        own, called = (EVALUATION_TEXT, "evaluation text") if evaluation else (DEFAULT_TEXT, "default text")
        return own.read_text(encoding="utf-8"), f"headwise's {called}"
    called = ", ".join("standard input" if name == "-" else name for name in names)
    return "\n\n".join(read_text(name) for name in names), called


@cache  # a stream ends once, and several steps may ask for it
def _all_of(stream: TextIO) -> bytes:
    return stream.buffer.read()


def read_text(name: str) -> str:
    """The text of one file, or of standard input for "-"; lines end in a line feed, whatever they ended in there."""
    try:
        raw = _all_of(sys.stdin) if name == "-" else Path(name).expanduser().read_bytes()
        return TextIOWrapper(BytesIO(raw), encoding="utf-8").read()
    except FileNotFoundError:
        raise InputError(f"There is no file {name}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as text: {error}.") from None
