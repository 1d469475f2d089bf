"""Files of training text, of any size: checked and read in pieces."""

from __future__ import annotations

import hashlib
from codecs import getincrementaldecoder
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from headwise.files.errors import InputError

PIECE = 2**16


@dataclass(frozen=True, slots=True)
class Source:
    """A file of UTF-8 text."""

    path: Path
    sha256: str
    characters: int


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


def pieces_of(path: Path) -> Generator[str, None, None]:
    """The text of a file in pieces that end where a line ends, if there are lines."""
    rest = ""
    with path.open(encoding="utf-8", newline="") as file:
        while block := file.read(PIECE):
            whole = rest + block
            end = whole.rfind("\n") + 1 or len(whole)
            rest = whole[end:]
            yield whole[:end]
    if rest:
        yield rest
