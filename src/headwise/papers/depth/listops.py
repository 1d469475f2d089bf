"""ListOps: nested lists of digits under MAX, MIN, MED (median) and SM (sum modulo 10), generated here."""

from __future__ import annotations

import random
from functools import cache
from statistics import median

import torch

from headwise.papers.kit.data import Labelled

OPERATORS = ("MAX", "MIN", "MED", "SM")
CLOSE, PAD = 14, 15
WORDS = 16  # ten digits, four operators, a bracket, padding
MOST, DEEPEST, NESTED = 5, 4, 0.3


@cache
def listops(count: int, length: int) -> Labelled:
    """``count`` different expressions of at most ``length`` words with their values; a tenth is held out."""
    generator = random.Random(0)
    values: dict[tuple[int, ...], int] = {}
    while len(values) < count:
        words, value = _expression(generator, 0)
        if length // 4 <= len(words) <= length:
            values[tuple(words)] = value
    inputs = torch.full((count, length), PAD)
    for row, words in zip(inputs, values):
        row[: len(words)] = torch.tensor(words)
    return Labelled(inputs, torch.tensor(list(values.values())), count * 9 // 10)


def _expression(generator: random.Random, depth: int) -> tuple[list[int], int]:
    """Words and value of a random expression."""
    operator = generator.randrange(len(OPERATORS))
    words, values = [10 + operator], []
    for _ in range(generator.randint(2, MOST)):
        if depth < DEEPEST and generator.random() < NESTED:
            inner, value = _expression(generator, depth + 1)
            words += inner
        else:
            value = generator.randrange(10)
            words.append(value)
        values.append(value)
    return [*words, CLOSE], _value(OPERATORS[operator], values)


def _value(operator: str, values: list[int]) -> int:
    if operator == "SM":
        return sum(values) % 10
    if operator == "MED":
        return int(median(values))
    return max(values) if operator == "MAX" else min(values)
