"""Requests for answers of a form that can be checked, in the chat template of a model, and where its turn ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from headwise.data.processors import encode
from headwise.data.skills.question import Ids
from headwise.data.texts import Text
from headwise.data.windows import rendered

TRIALS = 24
THINGS = ("dog", "river", "table", "cloud", "lamp", "horse", "shoe", "garden", "bottle", "train")
COLOURS = ("red", "blue", "green", "yellow", "black", "white")
KINDS = ("animals", "fruits", "cities", "colours", "countries", "tools")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that ends where the model's turn begins, and whether what it then says has the form asked for."""

    prompt: Ids
    keeps: Callable[[str], bool]


def requests(tokenizer: Any, seed: int) -> list[Request]:
    """Requests of all forms in turns."""
    random, forms = Random(f"chat {seed}"), (_word, _number, _three, _object)
    asked = [forms[trial % len(forms)](random) for trial in range(TRIALS)]
    prompts = encode(tokenizer, rendered(tokenizer, _dialogues([text for text, _ in asked]), opening=True))
    return [Request(tuple(prompt), keeps) for prompt, (_, keeps) in zip(prompts, asked, strict=True)]


def turn_end(tokenizer: Any) -> int | None:
    """The special token that the template puts after what a model says."""
    said = "yes"
    dialogue = Text("a turn", dialogues=(({"role": "user", "content": "?"}, {"role": "assistant", "content": said}),))
    (row,) = rendered(tokenizer, dialogue)
    after = encode(tokenizer, row[row.rindex(said) + len(said) :])
    return next((token for token in after if token in tokenizer.all_special_ids), None)


def _dialogues(asked: Sequence[str]) -> Text:
    return Text("requests", dialogues=tuple(({"role": "user", "content": text},) for text in asked))


def _word(random: Random) -> tuple[str, Callable[[str], bool]]:
    thing = random.choice(THINGS)
    return f"Name one thing that goes well with a {thing}. Answer with one word only.", _is_word


def _number(random: Random) -> tuple[str, Callable[[str], bool]]:
    thing = random.choice(THINGS)
    return f'How many letters has the word "{thing}"? Answer with a number in digits only.', _is_number


def _three(random: Random) -> tuple[str, Callable[[str], bool]]:
    kind = random.choice(KINDS)
    return f"Name three {kind}. Answer with the three names only, in one line with commas between them.", _is_three


def _object(random: Random) -> tuple[str, Callable[[str], bool]]:
    thing, colour = random.choice(THINGS), random.choice(COLOURS)
    return (
        f'Describe a {colour} {thing} as JSON with the keys "thing" and "colour". Answer with the JSON object only.',
        _is_object,
    )


def _is_word(reply: str) -> bool:
    return re.fullmatch(r"\w+\.?", reply) is not None


def _is_number(reply: str) -> bool:
    return re.fullmatch(r"\d+\.?", reply) is not None


def _is_three(reply: str) -> bool:
    return re.fullmatch(r"[^,\n]+,[^,\n]+,[^,\n]+", reply) is not None


def _is_object(reply: str) -> bool:
    try:
        return set(json.loads(reply)) == {"thing", "colour"}
    except (ValueError, TypeError):
        return False
