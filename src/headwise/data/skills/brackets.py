"""JSON that breaks off: which brackets close it, among others of as many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from headwise.data.skills.question import Question, offered

TRIALS, WRONG = 40, 3
KEYS = ("name", "city", "items", "data", "tags", "owner", "values", "list", "user", "info")
VALUES = ('"red"', '"Anna"', '"2024"', '"north"', '"open"', "12", "7", "305", "true", "null")
CLOSING = {"{": "}", "[": "]"}


def brackets(tokenizer: Any, before: Sequence[int], seed: int) -> list[Question]:
    """Questions about the end of a nested object, after a whole one."""
    random, questions = Random(f"json {seed}"), []
    for trial in range(TRIALS):
        example, closing = _open(random, 2)
        text, right = _open(random, random.choice((2, 3)))
        wrong = ["".join(each) for each in product("]}", repeat=len(right)) if "".join(each) != right]
        answers = [f"{each}\n" for each in (right, *random.sample(wrong, WRONG))]
        prompt, rests = offered(tokenizer, before, f"{example}{closing}\n{text}", answers)
        questions.append(Question("JSON", trial, prompt, rests))
    return questions


def _open(random: Random, depth: int) -> tuple[str, str]:
    """An object that lacks its last brackets, and these."""
    kinds = ["{", *random.choices("{[", k=depth - 1)]
    text = "".join(f"{kind}{_inside(random, kind)}, {_key(random) if kind == '{' else ''}" for kind in kinds[:-1])
    text += f"{kinds[-1]}{_inside(random, kinds[-1])}"
    return text, "".join(CLOSING[kind] for kind in reversed(kinds))


def _inside(random: Random, kind: str) -> str:
    value = random.choice(VALUES)
    return f"{_key(random)}{value}" if kind == "{" else f"{value}, {random.choice(VALUES)}"


def _key(random: Random) -> str:
    return f'"{random.choice(KEYS)}": '
