"""Small exercises of a language model, made from a seed in the tokens of any tokenizer: from text to questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.data.processors import encode
from headwise.data.skills.brackets import brackets
from headwise.data.skills.chat import Request, requests
from headwise.data.skills.copying import copying
from headwise.data.skills.needle import needle
from headwise.data.skills.question import Question
from headwise.data.skills.sums import sums
from headwise.data.texts import Text
from headwise.data.windows import has_chat, special_around

CHARACTERS = 8  # of text for each token of the longest haystack


@dataclass(frozen=True, slots=True)
class Exercises:
    """What a model is asked, what it is requested to write, and notes on what it could not be asked."""

    questions: tuple[Question, ...]
    requests: tuple[Request, ...]
    notes: tuple[str, ...]


def exercises(tokenizer: Any, prose: Text, lengths: tuple[int, ...], longest: int, seed: int) -> Exercises:
    """All exercises for a model that reads up to ``longest`` tokens; needles are hidden in ``prose``."""
    before, _ = special_around(tokenizer)
    haystack = tuple(encode(tokenizer, "\n\n".join(prose.passages)[: CHARACTERS * 4 * max(lengths)]))
    ordinary = tuple(sorted(set(haystack) - set(tokenizer.all_special_ids)))
    questions, notes = [], []
    for length in lengths:
        hidden = needle(tokenizer, before, haystack, length, seed)
        if not hidden:
            notes.append(f"No needles in {length:,} tokens: they or the text they are hidden in do not fill as many.")
        questions += hidden
    questions += copying(before, ordinary, longest, seed)
    asked = [*sums(tokenizer, before, seed), *brackets(tokenizer, before, seed)]
    fitting = [question for question in asked if _tokens(question) <= longest]
    if len(fitting) < len(asked):
        notes.append(f"Sums and JSON are left out where they take more than the {longest:,} tokens the model reads.")
    chat = tuple(requests(tokenizer, seed)) if has_chat(tokenizer) else ()
    return Exercises((*questions, *fitting), chat, tuple(notes))


def _tokens(question: Question) -> int:
    return len(question.prompt) + max(map(len, question.answers))
