"""From text to windows of tokens: spread over all of it, some for calibration, some held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from headwise.data.processors import encode
from headwise.data.texts import Text
from headwise.files.errors import InputError

CHARACTERS = 16  # of text for each token that is needed; more of it is not tokenised
WARN, REFUSE = 0.02, 0.20  # share of unknown, padding or repeated tokens
RUN = 3  # of one token in a row; more of them are counted as repeated
SHORTEST = 8

Window = list[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text in tokens. Rows are its examples or dialogues; ``before`` and ``after`` belong around a window.

    ``apart``: a window holds one row. ``starts``: it begins where a row begins, and goes on into the next ones.
    """

    name: str
    kind: str
    rows: list[list[int]]
    before: list[int]
    after: list[int]
    apart: bool
    starts: bool
    empty: dict[str, float]  # shares of unknown, padding and repeated tokens

    @property
    def count(self) -> int:
        """Tokens in all, without those around windows."""
        return sum(map(len, self.rows))

    @property
    def around(self) -> int:
        """Special tokens of a window."""
        return len(self.before) + len(self.after)

    def warnings(self, *, accept: bool = False) -> list[str]:
        """Notes about unknown, padding and repeated tokens; too many of them are refused unless ``accept``."""
        notes = []
        for what, share in self.empty.items():
            sentence = f"{share:.0%} of the tokens of {self.name} are {what}"
            if share > REFUSE and not accept:
                raise InputError(
                    f"{sentence}: this is not what the model reads. Give text of its own kind, or say `accept_text` "
                    "if it is."
                )
            if share > WARN:
                notes.append(f"{sentence}: what is measured on them says little of the model's own text.")
        return notes


def has_chat(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def tokenise(tokenizer: Any, text: Text, most: int, source: str) -> Tokens:
    """``text`` in the tokens of the model at ``source``; of a long one about ``most``, from all over it."""
    if not has_chat(tokenizer):
        text = text.plain()
    before, after = special_around(tokenizer)
    if text.kind == "chat":
        rows, before, after = (
            _encode(tokenizer, rendered(tokenizer, text)),
            [],
            [],
        )  # the template has its own special tokens
    elif text.apart:
        rows = _encode(tokenizer, text.passages)
    else:
        rows = _encode(tokenizer, [_thinned("\n\n".join(text.passages), most)])
    rows = [row for row in rows if row]
    if not rows:
        raise InputError(
            f"The tokenizer of {source} makes no tokens of {text.name}: it is empty or not the model's own. "
            "Inputs can also be given as arrays, as `inputs`."
        )
    empty = _empty(tokenizer, rows)
    return Tokens(text.name, text.kind, rows, before, after, text.apart, text.kind == "chat", empty)


def spread(tokens: Tokens, length: int, total: int) -> list[Window]:
    """Disjoint windows of ``length``, evenly from all over the text, which hold about ``total`` tokens together."""
    if not (tokens.apart or tokens.starts):
        (row,) = tokens.rows
        inside = length - tokens.around
        count = max(1, min(total // length, len(row) // inside))
        starts = np.linspace(0, max(0, len(row) - inside), count).round().astype(int)
        return [_framed(tokens, row[start : start + inside]) for start in starts]
    every = in_order(tokens, length)
    mean = sum(map(len, every)) / max(1, len(every))
    count = max(1, min(len(every), round(total / mean))) if every else 0
    return [every[place] for place in np.linspace(0, len(every) - 1, count).round().astype(int)]


def in_order(tokens: Tokens, length: int) -> list[Window]:
    """All windows of ``length`` that the text holds, one after the other; examples kept apart may be shorter."""
    inside = length - tokens.around
    if inside < 1:
        return []
    if tokens.apart:
        return [_framed(tokens, row[:inside]) for row in tokens.rows if len(row) + tokens.around > 1]
    windows, current = [], []
    for row in tokens.rows:
        current = current + row
        while len(current) >= inside:
            windows.append(_framed(tokens, current[:inside]))
            current = [] if tokens.starts else current[inside:]
    return windows


def hold_out(windows: Sequence[Window], share: float) -> tuple[list[Window], list[Window]]:
    """``windows`` for calibration and, evenly from between them, a held-out ``share``: at least one of two."""
    count = len(windows)
    held = min(max(1, round(share * count)), count - 1) if count > 1 else 0
    places = set(np.linspace(0, count - 1, held + 2)[1:-1].round().astype(int).tolist())
    main = [window for place, window in enumerate(windows) if place not in places]
    return main, [windows[place] for place in sorted(places)]


def _framed(tokens: Tokens, ids: list[int]) -> Window:
    return tokens.before + ids + tokens.after


def special_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens the model wants before and after a sequence."""
    plain, full = encode(tokenizer, "word"), encode(tokenizer, "word", special=True)
    start = next((i for i in range(len(full)) if plain and full[i : i + len(plain)] == plain), None)
    return ([], []) if start is None else (full[:start], full[start + len(plain) :])


def _encode(tokenizer: Any, passages: Sequence[str]) -> list[list[int]]:
    return [encode(tokenizer, passage) for passage in passages]


def rendered(tokenizer: Any, text: Text, *, opening: bool = False) -> list[str]:
    """Dialogues in the chat template of the tokenizer; with ``opening`` up to where the model's next turn begins."""
    try:
        return [
            tokenizer.apply_chat_template(list(dialogue), tokenize=False, add_generation_prompt=opening)
            for dialogue in text.dialogues
        ]
    except Exception as error:  # templates are foreign input, and raise what they like
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"The chat template of the model does not take {text.name}: {reason}") from error


def _empty(tokenizer: Any, rows: list[list[int]]) -> dict[str, float]:
    """Shares of unknown, padding and repeated tokens."""
    total = sum(map(len, rows))
    special = {"unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    counts = {
        name: sum(row.count(token) for row in rows)
        for name, token in special.items()
        if token is not None and token != tokenizer.eos_token_id
    }
    if special["padding"] == special["unknown"]:
        counts.pop("padding", None)
    runs = (sum(1 for _ in run) for row in rows for token, run in groupby(row) if token not in special.values())
    counts["repeated"] = sum(max(0, run - RUN) for run in runs)
    return {name: count / total for name, count in counts.items()}


def _thinned(text: str, tokens: int) -> str:
    """A text much longer than needed cut down to pieces from all over it."""
    needed = CHARACTERS * tokens
    if len(text) <= 4 * needed:
        return text
    starts = np.linspace(0, len(text) - needed // 16, 16).astype(int)
    return "\n".join(text[start : start + needed // 16] for start in starts)
