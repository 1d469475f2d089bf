"""What a model learns from, whatever it reads: numbered rows, the last of which are only measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headwise.files.errors import InputError

MOST_HELD_OUT = 0.1  # of all rows
Rows = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class Examples:
    """``count`` rows to learn from, then ``held_out`` ones. ``rows`` gives inputs and wanted classes by number.

    ``tokenizer`` is the folder of the one that text was read with.
    """

    rows: Rows
    count: int
    held_out: int
    tokens_each: int
    name: str
    sha256: str
    tokenizer: str = ""

    @classmethod
    def split(cls, rows: Rows, total: int, tokens_each: int, held_out: int, name: str, sha256: str) -> Examples:
        """All rows but the last, which hold ``held_out`` tokens if that is not too large a part of them."""
        if total < 2:  # noqa: PLR2004 - one to learn from, one to measure on
            raise InputError(
                f"{name} holds {total} rows of {tokens_each:,} tokens, and 2 are the least: one to learn from, one to "
                "measure on. Give more data or a shorter context."
            )
        held = max(1, min(round(held_out / tokens_each), int(MOST_HELD_OUT * total)))
        return cls(rows, total - held, held, tokens_each, name, sha256)
