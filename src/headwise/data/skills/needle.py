"""Needles in a haystack: which secret word belongs to which city, said once somewhere in a long text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

from headwise.data.processors import encode
from headwise.data.skills.question import Ids, Question, offered

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
TRIALS = 8
CITIES = (
    *("Paris", "Rome", "Berlin", "Madrid", "London", "Vienna", "Dublin", "Lisbon", "Athens", "Cairo", "Moscow"),
    *("Tokyo", "Boston", "Chicago", "Denver", "Seattle"),
)
WORDS = (  # no two begin alike, so that any tokenizer tells them apart at the first token
    *("apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle"),
    *("lemon", "mirror", "needle", "orange", "pencil", "queen", "river", "silver", "tiger", "umbrella", "violin"),
    *("window", "zebra"),
)
ABSENT = 5  # of the words on offer are nowhere in the text


def needle(tokenizer: Any, before: Sequence[int], haystack: Ids, length: int, seed: int) -> list[Question]:
    """Questions about needles at all depths of pieces of ``haystack``; none where ``length`` has no room for them.

    All needles of a text are asked for, one after the other, so that one pass answers for every depth.
    """
    random, questions = Random(f"needle {length} {seed}"), []
    for trial in range(TRIALS):
        asked = _text(tokenizer, before, haystack, length, trial, random)
        if not asked:
            return []
        questions += asked
    return questions


def _text(
    tokenizer: Any, before: Sequence[int], haystack: Ids, length: int, trial: int, random: Random
) -> list[Question]:
    cities = random.sample(CITIES, len(DEPTHS))
    words = random.sample(WORDS, len(DEPTHS) + ABSENT)
    needles = [encode(tokenizer, f" {_says(city)} {word}.") for city, word in zip(cities, words)]
    order = random.sample(range(len(DEPTHS)), len(DEPTHS))
    asked: list[tuple[int, Ids, tuple[Ids, ...]]] = []
    tail: list[int] = []
    for number in order:
        others = [word for word in words if word != words[number]]
        offer = [f" {word}" for word in (words[number], *others)]
        prompt, answers = offered(tokenizer, tail, f"\n{_says(cities[number])}", offer)
        asked.append((number, prompt, answers))
        tail = [*tail, *encode(tokenizer, f"\n{_says(cities[number])} {words[number]}.")]
    room = length - len(before) - sum(map(len, needles)) - len(asked[-1][1])
    if room < len(DEPTHS) or room > len(haystack):
        return []
    start = random.randrange(len(haystack) - room + 1)
    hay = haystack[start : start + room]
    cuts = [0, *(round(depth * room) for depth in DEPTHS), room]
    pieces = [hay[first:last] for first, last in pairwise(cuts)]
    text = list(before)
    for piece, hidden in zip(pieces, [*needles, []], strict=True):
        text += [*piece, *hidden]
    return [
        Question(
            "needle",
            trial,
            (*text, *prompt),
            answers,
            {"length": f"{length:,} tokens", "depth": f"{DEPTHS[number]:.0%} deep"},
        )
        for number, prompt, answers in sorted(asked)
    ]


def _says(city: str) -> str:
    return f"The secret word of {city} is"
