"""Sums of two numbers below a hundred, after a few examples, among results that are nearly right."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from headwise.data.skills.question import Question, offered

TRIALS, SHOTS, WRONG = 40, 4, 6
LOW, HIGH = 10, 99  # all answers have two digits
NEAR = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)


def sums(tokenizer: Any, before: Sequence[int], seed: int) -> list[Question]:
    """Questions of the form ``23 + 45 =``."""
    random, questions = Random(f"sums {seed}"), []
    for trial in range(TRIALS):
        *shots, (one, other) = [_pair(random) for _ in range(SHOTS + 1)]
        near = [one + other + step for step in NEAR if LOW <= one + other + step <= HIGH]
        answers = [one + other, *random.sample(near, WRONG)]
        text = "".join(f"{a} + {b} = {a + b}\n" for a, b in shots) + f"{one} + {other} ="
        prompt, rests = offered(tokenizer, before, text, [f" {answer}" for answer in answers])
        questions.append(Question("sums", trial, prompt, rests))
    return questions


def _pair(random: Random) -> tuple[int, int]:
    one = random.randint(LOW, HIGH - LOW)
    return one, random.randint(LOW, HIGH - one)
