"""Text to learn from, in files of any size or in memory: checked and read in pieces."""

from __future__ import annotations

import hashlib
from codecs import getincrementaldecoder
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from headwise.files.errors import InputError

PIECE = 2**16
LONGEST_NAME = 1024  # characters: longer texts are not looked for on the disk
IN_MEMORY = "text"

Datum = Path | str  # a file, or a text itself


@dataclass(frozen=True, slots=True)
class Source:
    """A file of UTF-8 text, or a text in memory."""

    datum: Datum
    sha256: str
    characters: int

    def open(self) -> TextIO:
        """Its text, line ends as they are."""
        if isinstance(self.datum, str):
            return StringIO(self.datum, newline="")
        return self.datum.open(encoding="utf-8", newline="")


def data_of(data: Any) -> tuple[Datum, ...]:
    """What to learn from, one by one: a text or texts, files (`Path`), or the column "text" of a `datasets.Dataset`."""
    columns = getattr(data, "column_names", None)
    if columns is not None:
        if IN_MEMORY not in columns:
            raise InputError(f"This dataset has the columns {', '.join(columns)}; `data` needs one called {IN_MEMORY}.")
        data = data[IN_MEMORY]
    single = [data] if isinstance(data, str | Path) else list(data)
    for datum in single:
        if not isinstance(datum, str | Path):
            raise InputError(f"`data` must be text or files (Path), not {type(datum).__name__}.")
        if isinstance(datum, str) and _names_a_file(datum):
            raise InputError(f"{datum} is a file, and a string is taken as the text itself: give `data` as a Path.")
    return tuple(datum for datum in single if datum != "")


def _names_a_file(text: str) -> bool:
    with suppress(OSError, ValueError):
        return 0 < len(text) < LONGEST_NAME and Path(text).is_file()
    return False


def called(data: Sequence[Datum], *, whole: bool = True) -> str:
    """What to call these data: paths of files (or without ``whole`` names), and "text" for what is in memory."""
    files = [str(datum) if whole else datum.name for datum in data if isinstance(datum, Path)]
    return ", ".join([*files, IN_MEMORY] if len(files) < len(data) else files)


def read_source(datum: Datum) -> Source:
    """What ``datum`` holds, or an `InputError` where it is not text."""
    return check_source(datum.expanduser()) if isinstance(datum, Path) else _check_text(datum)


def _check_text(text: str) -> Source:
    if "\0" in text:
        raise InputError(f"A text in `data` is no text: character {text.index(chr(0)):,} is zero.")
    try:
        return Source(text, hashlib.sha256(text.encode()).hexdigest(), len(text))
    except UnicodeEncodeError as error:
        raise InputError(f"A text in `data` cannot be written in UTF-8: {error.reason}.") from None


def check_source(path: Path) -> Source:
    """Read a file once and raise where it is not UTF-8 text."""
    digest, characters, done = hashlib.sha256(), 0, 0
    decoder = getincrementaldecoder("utf-8")()
    cut = 0  # bytes of a character whose rest is in the next piece
    try:
        with path.open("rb") as file:
            while block := file.read(PIECE):
                if 0 in block:
                    raise InputError(f"{path} is not UTF-8 text: byte {done + block.index(0):,} is zero.")
                cut = len(decoder.getstate()[0])
                characters += len(decoder.decode(block))
                digest.update(block)
                done += len(block)
            cut = len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {done - cut + error.start:,}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    if not done:
        raise InputError(f"{path} holds no text: it has 0 bytes.")
    return Source(path, digest.hexdigest(), characters)


def pieces_of(source: Source) -> Generator[str, None, None]:
    """A text in pieces that end where a line ends, if there are lines."""
    rest = ""
    with source.open() as file:
        while block := file.read(PIECE):
            whole = rest + block
            end = whole.rfind("\n") + 1 or len(whole)
            rest = whole[end:]
            yield whole[:end]
    if rest:
        yield rest
