"""Text to measure on, before it is tokens: files, standard input, or what comes with headwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, Literal, TextIO

from headwise.files.errors import InputError
from headwise.files.reading import parse_json
from headwise.records.settings import TextFormat

TEXTS = resources.files("headwise.data") / "text"
DEFAULT_TEXT, EVALUATION_TEXT = TEXTS / "default.txt", TEXTS / "evaluation.txt"
DIALOGUES, EVALUATION_DIALOGUES = TEXTS / "dialogues.jsonl", TEXTS / "dialogues-evaluation.jsonl"
ROLES = ("system", "user", "assistant", "tool")
SEQUENCES, LETTERS = 0.9, 20  # so many lines are one long word: a file of sequences (of proteins, say), no prose

Kind = Literal["prose", "chat"]
Dialogue = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Passages of one long text, or dialogues. Where passages are ``apart``, each is an example of its own."""

    name: str
    passages: tuple[str, ...] = ()
    dialogues: tuple[Dialogue, ...] = ()
    apart: bool = False

    @property
    def kind(self) -> Kind:
        """What it is shown to a model as."""
        return "chat" if self.dialogues else "prose"

    def plain(self) -> Text:
        """The same for a model without a chat template: what is said in a dialogue, as an example of its own."""
        if not self.dialogues:
            return self
        said = tuple("\n\n".join(message["content"] for message in dialogue) for dialogue in self.dialogues)
        return Text(self.name, passages=said, apart=True)


def read_texts(
    names: Sequence[str], form: TextFormat = "auto", *, evaluation: bool = False, chat: bool = False
) -> tuple[Text, ...]:
    """The texts of all files of ``names`` ("-": standard input), prose first, then dialogues.

    Without names it is headwise's own: prose, and for models that ``chat`` dialogues too. What is for ``evaluation`` is
    not in what is measured or healed on.
    """
    if not names:
        return own_texts(evaluation=evaluation, chat=chat)
    read = [_read(name, form) for name in names]
    found = []
    for kind in ("prose", "chat"):
        parts = [text for text in read if text.kind == kind]
        if parts:
            if len({part.apart for part in parts}) > 1:
                raise InputError("Some of these files hold examples line by line and some do not: give a text format.")
            found.append(
                Text(
                    ", ".join(part.name for part in parts),
                    tuple(passage for part in parts for passage in part.passages),
                    tuple(dialogue for part in parts for dialogue in part.dialogues),
                    parts[0].apart,
                )
            )
    return tuple(found)


@cache
def own_texts(*, evaluation: bool = False, chat: bool = False) -> tuple[Text, ...]:
    """The texts that come with headwise."""
    prose, dialogues = (EVALUATION_TEXT, EVALUATION_DIALOGUES) if evaluation else (DEFAULT_TEXT, DIALOGUES)
    use = "evaluation" if evaluation else "default"
    found = [Text(f"headwise's {use} text", passages=(prose.read_text(encoding="utf-8"),))]
    if chat:
        found.append(Text(f"headwise's {use} dialogues", dialogues=_own_dialogues(dialogues)))
    return tuple(found)


def read_text(name: str) -> str:
    """The text of one file, or of standard input for "-"; lines end in a line feed, whatever they ended in there."""
    try:
        raw = _all_of(sys.stdin) if name == "-" else Path(name).expanduser().read_bytes()
        return TextIOWrapper(BytesIO(raw), encoding="utf-8").read()
    except FileNotFoundError:
        raise InputError(f"There is no file {name}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as text: {error}.") from None


@cache  # a stream ends once, and several steps may ask for it
def _all_of(stream: TextIO) -> bytes:
    return stream.buffer.read()


def _read(name: str, form: TextFormat) -> Text:
    content, called = read_text(name), "standard input" if name == "-" else name
    if not content.strip():
        raise InputError(f"{called} holds no text.")
    if name.endswith(".jsonl"):
        return _json_lines(content, called)
    lines = tuple(line.strip() for line in content.splitlines() if line.strip())
    if form == "auto":
        form = "lines" if len(lines) > 1 and _are_sequences(lines) else "document"
    return Text(called, lines, apart=True) if form == "lines" else Text(called, (content,))


def _are_sequences(lines: tuple[str, ...]) -> bool:
    return sum(len(line) >= LETTERS and len(line.split()) == 1 for line in lines) >= SEQUENCES * len(lines)


def _json_lines(content: str, name: str) -> Text:
    """A file of one JSON object in each line: with ``messages`` (a dialogue) or with ``text`` (an example)."""
    dialogues, passages = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        row = parse_json(line.encode(), f"{name}, line {number}")
        if isinstance(row, dict) and "messages" in row:
            dialogues.append(_dialogue(row["messages"], f"{name}, line {number}"))
        elif isinstance(row, dict) and isinstance(row.get("text"), str):
            passages.append(row["text"])
        else:
            raise InputError(f'{name}, line {number}: expected an object with "messages" or "text".')
    if dialogues and passages:
        raise InputError(f'{name} mixes lines with "messages" and lines with "text": give them as two files.')
    return Text(name, tuple(passages), tuple(dialogues), apart=bool(passages))


def _own_dialogues(file: Traversable) -> tuple[Dialogue, ...]:
    return _json_lines(file.read_text(encoding="utf-8"), file.name).dialogues


def _dialogue(messages: Any, where: str) -> Dialogue:
    fine = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not fine or any(
        message.get("role") not in ROLES or not isinstance(message.get("content"), str) for message in messages
    ):
        raise InputError(f'{where}: messages must be objects with a "role" ({", ".join(ROLES)}) and a text "content".')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
