"""Questions in tokens: what a model has read, and the answers among which it should find the right one likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from headwise.data.processors import encode

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One decision of a ``trial``; the right one of ``answers`` comes first, a single one stands against all tokens.

    ``parts`` says by what the skill is taken apart: {"length": "1,024 tokens"}.
    """

    skill: str
    trial: int
    prompt: Ids
    answers: tuple[Ids, ...]
    parts: dict[str, str] = field(default_factory=dict)


def offered(tokenizer: Any, before: Sequence[int], text: str, answers: Sequence[str]) -> tuple[Ids, tuple[Ids, ...]]:
    """The tokens that all of ``text`` + answer begin with, after ``before``, and those in which the answers go on.

    Only the first ones where these already tell all answers apart: that takes a single pass over the prompt.
    """
    rows = [encode(tokenizer, text + answer) for answer in answers]
    shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False)))
    rests = tuple(tuple(row[shared:]) for row in rows)
    if len({rest[0] for rest in rests}) == len(rests):
        rests = tuple(rest[:1] for rest in rests)
    return (*before, *rows[0][:shared]), rests
