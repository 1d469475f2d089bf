"""Text to measure on, before it is tokens: files, objects in memory, or what comes with headwise."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

GZIP = b"\x1f\x8b"

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
        passages = tuple("\n\n".join(message["content"] for message in dialogue) for dialogue in self.dialogues)
        return Text(self.name, passages=passages, apart=True)


class Files(tuple[str, ...]):
    """Names of files of text, as a person gives them: "-" is standard input."""


def texts_of(
    given: Any, form: TextFormat = "auto", *, evaluation: bool = False, chat: bool = False
) -> tuple[Text, ...]:
    """``given`` as texts: a string, strings, dialogues, a `datasets.Dataset` of either, files, or headwise's own.

    A string is one text, as if read from a file. Several are examples, each by itself, as the lines of a .jsonl file;
    with ``form`` "document" they are one long text. Dialogues are ``{"messages": [...]}``; rows of a dataset have
    ``text`` or ``messages``. A `pathlib.Path` is a file. None is the text that comes with headwise: see `own_texts`.
    """
    if given is None:
        return own_texts(evaluation=evaluation, chat=chat)
    if isinstance(given, Files):
        return read_texts(given, form, evaluation=evaluation, chat=chat)
    rows: list[Any] = [given] if isinstance(given, str | Path) else _listed(given)
    if all(isinstance(row, Text) for row in rows):
        return tuple(rows)
    if all(isinstance(row, Path) for row in rows):
        return read_texts([str(row) for row in rows], form)
    if len(rows) == 1 and isinstance(rows[0], str):
        return (_document(rows[0], "1 text", form),)
    named = [{"text": row} if isinstance(row, str) else row for row in rows]
    text = _from_rows([(row, f"Row {number} of `text`") for number, row in enumerate(named)], "`text`")
    if form == "document" and text.passages:
        text = replace(text, apart=False)
    return (replace(text, name=f"{len(rows):,} {'dialogues' if text.dialogues else 'texts'}"),)


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
    texts = []
    for kind in ("prose", "chat"):
        parts = [text for text in read if text.kind == kind]
        if parts:
            if len({part.apart for part in parts}) > 1:
                raise InputError("Some of these files hold examples line by line and some do not: give a text format.")
            texts.append(
                Text(
                    ", ".join(part.name for part in parts),
                    tuple(passage for part in parts for passage in part.passages),
                    tuple(dialogue for part in parts for dialogue in part.dialogues),
                    parts[0].apart,
                )
            )
    return tuple(texts)


@cache
def own_texts(*, evaluation: bool = False, chat: bool = False) -> tuple[Text, ...]:
    """The texts that come with headwise."""
    prose, dialogues = (EVALUATION_TEXT, EVALUATION_DIALOGUES) if evaluation else (DEFAULT_TEXT, DIALOGUES)
    use = "evaluation" if evaluation else "default"
    texts = [Text(f"headwise's {use} text", passages=(prose.read_text(encoding="utf-8"),))]
    if chat:
        texts.append(Text(f"headwise's {use} dialogues", dialogues=_own_dialogues(dialogues)))
    return tuple(texts)


def read_text(name: str) -> str:
    """The text of one file, or of standard input for "-", also gzipped; lines end in a line feed, whatever they did."""
    try:
        raw = _all_of(sys.stdin) if name == "-" else Path(name).expanduser().read_bytes()
        if raw.startswith(GZIP):
            raw = gzip.decompress(raw)
        return TextIOWrapper(BytesIO(raw), encoding="utf-8").read()
    except FileNotFoundError:
        raise InputError(f"There is no file {name}.") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as text: {error}.") from None


@cache  # a stream ends once, and several steps may ask for it
def _all_of(stream: TextIO) -> bytes:
    return stream.buffer.read()


def _read(name: str, form: TextFormat) -> Text:
    content, called = read_text(name), "standard input" if name == "-" else name
    if name.removesuffix(".gz").endswith(".jsonl") and content.strip():
        return _json_lines(content, called)
    return _document(content, called, form)


def _document(content: str, name: str, form: TextFormat) -> Text:
    """One long text, or examples line by line."""
    if not content.strip():
        raise InputError(f"{name} holds no text.")
    lines = tuple(line.strip() for line in content.splitlines() if line.strip())
    if form == "auto":
        form = "lines" if len(lines) > 1 and _are_sequences(lines) else "document"
    return Text(name, lines, apart=True) if form == "lines" else Text(name, (content,))


def _are_sequences(lines: tuple[str, ...]) -> bool:
    return sum(len(line) >= LETTERS and len(line.split()) == 1 for line in lines) >= SEQUENCES * len(lines)


def _json_lines(content: str, name: str) -> Text:
    """A file of one JSON object in each line: with ``messages`` (a dialogue) or with ``text`` (an example)."""
    lines = [(line, f"{name}, line {number}") for number, line in enumerate(content.splitlines(), start=1)]
    return _from_rows(((parse_json(line.encode(), where), where) for line, where in lines if line.strip()), name)


def _from_rows(rows: Iterable[tuple[Any, str]], name: str) -> Text:
    """Examples or dialogues out of objects, each with where it stands."""
    dialogues, passages = [], []
    for row, where in rows:
        if isinstance(row, Mapping) and "messages" in row:
            dialogues.append(_dialogue(row["messages"], where))
        elif isinstance(row, Mapping) and isinstance(row.get("text"), str):
            passages.append(row["text"])
        else:
            raise InputError(f'{where}: expected an object with "messages" or "text".')
    if dialogues and passages:
        raise InputError(f'{name} mixes lines with "messages" and lines with "text": give them as two files.')
    return Text(name, tuple(passages), tuple(dialogues), apart=bool(passages))


def _listed(given: Any) -> list[Any]:
    """All rows of a list or a dataset."""
    if isinstance(given, Mapping):  # also a dataset with its splits
        raise InputError(f"`text` holds {', '.join(map(str, given)) or 'nothing'}: give one of these.")
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InputError(f"`text` may be a string, a list of strings or dialogues, or a dataset, not {type(given)}.")
    rows = list(given)
    if not rows:
        raise InputError("`text` holds no text.")
    return rows


def _own_dialogues(file: Traversable) -> tuple[Dialogue, ...]:
    return _json_lines(file.read_text(encoding="utf-8"), file.name).dialogues


def _dialogue(messages: Any, where: str) -> Dialogue:
    fine = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not fine or any(
        message.get("role") not in ROLES or not isinstance(message.get("content"), str) for message in messages
    ):
        raise InputError(f'{where}: messages must be objects with a "role" ({", ".join(ROLES)}) and a text "content".')
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
