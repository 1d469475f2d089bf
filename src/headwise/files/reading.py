"""JSON read strictly: types, ranges, lengths, finite numbers, with errors that name what is expected and what is there.

Everything headwise reads as JSON comes through here, its own records and the configs of others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from headwise.files.errors import InputError

Kind = TypeVar("Kind")
LARGEST = 1e100  # so that sums and products of what is read stay finite
MOST = 2**53  # the largest whole number that survives every program
DEEPEST = 32  # lists and objects inside each other
LONGEST = 80  # characters of a text that an error repeats


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an `InputError`."""
    content = parse_json(_read(path), f"{path}")
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {_kind(content)}.")
    return content


def read_record(path: Path, kind: str, version: int) -> Reader:
    """The fields of a record of ``kind``, no newer than ``version``."""
    content = read_json(path)
    actual = content.get("headwise")
    if actual != kind:
        was = f"a headwise {actual}" if isinstance(actual, str) else "some other JSON file"
        raise InputError(f"{path}: expected a headwise {kind}, found {was}.")
    written = content.get("version")
    if not isinstance(written, int) or written < 1:
        raise InputError(f"{path}: expected a version number, found {written!r}.")
    if written > version:
        raise InputError(
            f"{path} is a {kind} of version {written}; this headwise reads up to {version}: pip install -U headwise."
        )
    return Reader(content, f"{path}")


def read_lines(path: Path) -> list[Reader]:
    """The JSON objects of a file that grows line by line; a last line that a kill has cut short is left out."""
    *whole, _ = _read(path).split(b"\n")
    lines = [
        Reader(parse_json(line, f"{path}, line {n}"), f"{path}, line {n}") for n, line in enumerate(whole, start=1)
    ]
    for line in lines:
        if not isinstance(line.content, dict):
            raise line.error("expected a JSON object")
    return lines


class Reader:
    """A piece of a JSON file that knows where it stands, for errors a person can act on."""

    def __init__(self, content: Any, where: str) -> None:
        self.content = content
        self.where = where

    def error(self, expected: str) -> InputError:
        """An `InputError` that points at this place."""
        return InputError(f"{self.where}: {expected}, found {_kind(self.content)}.")

    def only(self, *names: str) -> None:
        """Raise on a field that is none of ``names``: a misspelt one would be ignored silently."""
        unknown = sorted(set(self.content) - set(names)) if isinstance(self.content, dict) else []
        if unknown:
            raise InputError(f"{self.where}: unknown field {unknown[0]!r}; known are {', '.join(names)}.")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return isinstance(self.content, dict) and self.content.get(name) is not None

    def child(self, name: str) -> Reader:
        """The field ``name``, which must be there."""
        if not isinstance(self.content, dict):
            raise self.error("expected a JSON object")
        if name not in self.content:
            raise InputError(f"{self.where}: the field {name!r} is missing.")
        return Reader(self.content[name], f"{self.where}, {name}")

    def integer(self, name: str, least: int = -MOST, most: int = MOST) -> int:
        """The field ``name`` as a whole number within bounds."""
        return self.child(name).as_integer(least, most)

    def integers(self, least: int = -MOST, most: int = MOST) -> tuple[int, ...]:
        """This list of whole numbers within bounds."""
        return tuple(item.as_integer(least, most) for item in self.items())

    def number(self, name: str, least: float = -LARGEST) -> float:
        """The field ``name`` as a number, whole or not."""
        return self.child(name).as_number(least)

    def numbers(self, least: float = -LARGEST) -> tuple[float, ...]:
        """This list of numbers."""
        return tuple(item.as_number(least) for item in self.items())

    def nested(self, lengths: Sequence[int | None], least: float = -LARGEST, holes: int | None = None) -> Any:
        """Lists of numbers inside each other, so many of each as ``lengths`` say (None: any number, but the same).

        Items of the lists at depth ``holes`` may be null: what was not measured.
        """
        level = [self.content]
        for depth, length in enumerate(lengths):
            actual = {len(item) if type(item) is list else None for item in level}
            if len(actual) > 1 or None in actual or (length is not None and actual - {length}):
                raise self._unlike(lengths, least)
            level = [inner for item in level for inner in item if inner is not None or depth != holes]
        if not all((type(item) is float or type(item) is int) and least <= item <= LARGEST for item in level):
            raise self._unlike(lengths, least)
        return self.content

    def text(self, name: str) -> str:
        """The field ``name`` as text."""
        return self.child(name)._as(str, "text")

    def texts(self, name: str) -> tuple[str, ...]:
        """The field ``name`` as a list of texts."""
        return tuple(item._as(str, "text") for item in self.rows(name))

    def texts_by_name(self) -> dict[str, str]:
        """This object of texts."""
        return {name: self.text(name) for name in self._as(dict, "a JSON object")}

    def choice(self, name: str, options: Sequence[str]) -> Any:
        """The field ``name`` as one of the texts ``options``."""
        child = self.child(name)
        if child.content not in options:
            raise child.error(f"expected one of {', '.join(map(repr, options))}")
        return child.content

    def flag(self, name: str) -> bool:
        """The field ``name`` as true or false; false where it is missing."""
        return self.child(name)._as(bool, "true or false") if self.has(name) else False

    def mapping(self, name: str) -> dict[str, Any]:
        """The field ``name`` as an object; empty where it is missing."""
        return self.child(name)._as(dict, "a JSON object") if self.has(name) else {}

    def scores(self, name: str) -> dict[str, float]:
        """The field ``name`` as an object of numbers by name, at least one."""
        child = self.child(name)
        if not child._as(dict, "a JSON object"):
            raise child.error("expected at least one number")
        return {each: child.number(each) for each in child.content}

    def as_integer(self, least: int = -MOST, most: int = MOST) -> int:
        """This as a whole number within bounds."""
        value = self._as(int, "a whole number")
        if not least <= value <= most:
            bounds = f"from {least} on" if most == MOST else f"from {least} to {most}"
            raise self.error(f"expected a whole number {bounds}")
        return value

    def as_number(self, least: float = -LARGEST) -> float:
        """This as a number, whole or not."""
        if type(self.content) not in (int, float):
            raise self.error("expected a number")
        if not least <= self.content <= LARGEST:
            raise self.error("expected a finite number" + (f" from {least:g} on" if least > -LARGEST else ""))
        return self.content

    def rows(self, name: str) -> list[Reader]:
        """The items of the list ``name``."""
        return self.child(name).items()

    def items(self) -> list[Reader]:
        """The items of this list."""
        content = self._as(list, "a list")
        return [Reader(item, f"{self.where} {index}") for index, item in enumerate(content)]

    def _unlike(self, lengths: Sequence[int | None], least: float) -> InputError:
        shape = " x ".join("any" if length is None else str(length) for length in lengths)
        bound = f" from {least:g} on" if least > -LARGEST else ""
        return InputError(f"{self.where}: expected {shape} finite numbers{bound}.")

    def _as(self, kind: type[Kind], expected: str) -> Kind:
        if not isinstance(self.content, kind) or (kind is int and isinstance(self.content, bool)):
            raise self.error(f"expected {expected}")
        return self.content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None


def parse_json(raw: bytes, where: str) -> Any:
    """JSON out of bytes in UTF-8, all of whose numbers can be computed with and whose texts can be written again."""
    try:
        content = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        _check(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged or not JSON: {error}.") from None
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no finite number")


def _check(content: Any) -> None:
    """Raise a `ValueError` where something is too large, too deep or cannot be written; level by level, for speed."""
    level, depth = [content], 0
    while level:
        depth, deeper = depth + 1, []
        if depth > DEEPEST:
            raise ValueError(f"lists and objects lie more than {DEEPEST} deep inside each other")
        for item in level:
            kind = type(item)
            if kind is list:
                deeper += item
            elif kind is dict:
                deeper += item.values()
                deeper += item.keys()
            elif kind is float or kind is int:
                if not -LARGEST <= item <= LARGEST:
                    raise ValueError(f"a number beyond {LARGEST:g} is no number to compute with")
            elif kind is str:
                item.encode()
                if "\0" in item:
                    raise ValueError("a text holds a zero byte")
        level = deeper


def _kind(content: Any) -> str:
    if isinstance(content, str):
        return f"the text {content if len(content) <= LONGEST else content[:LONGEST] + ' ...'!r}"
    names = {dict: "an object", list: "a list", type(None): "nothing"}
    return names.get(type(content)) or repr(content)
