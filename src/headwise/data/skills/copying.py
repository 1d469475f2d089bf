"""Copying: a sequence of random tokens and the same once more, which an induction head predicts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headwise.data.skills.question import Ids, Question

TRIALS = {32: 16, 256: 6}  # of each length of a sequence


def copying(before: Sequence[int], tokens: Ids, longest: int, seed: int) -> list[Question]:
    """Questions for each token of the second round but its first, of sequences of different ``tokens``."""
    questions = []
    for length, trials in TRIALS.items():
        random = Random(f"copying {length} {seed}")
        for trial in range(trials):
            if length > len(tokens) or len(before) + 2 * length > longest:
                break
            row = tuple(random.sample(tokens, length))
            questions += [
                Question(
                    "copying",
                    trial,
                    (*before, *row, *row[:place]),
                    ((row[place],),),
                    {"length": f"{length} tokens"},
                )
                for place in range(1, length)
            ]
    return questions
