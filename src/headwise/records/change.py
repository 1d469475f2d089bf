"""One change of one layer, as a plan records it: what every kind of reduction must say of itself.

Plans, costs, tables, cards and pages know this interface and no kind. The kinds live in `headwise.reduction`, one
folder each, and make themselves known here when headwise is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self, cast

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.shape import LayerShape

Pairs = tuple[tuple[int, ...], ...]
Digits = tuple[tuple[str, ...], tuple[str, ...]]


class Change(ABC):
    """What is done to one layer. Subclasses are frozen dataclasses whose fields are what a plan file says.

    ``kind`` is the name in the file. Changes of a layer are applied by ascending ``order``, whatever order they were
    given in: removal 20, sharing 30, widths 40, absorbed 45, latent 50, bits 60, mlp 70, flatten 80. ``acts_on`` says
    which weights of the block they are applied to; "blocks" are changed blocks that become one.
    """

    __slots__ = ()
    kind: ClassVar[str]
    order: ClassVar[int]
    acts_on: ClassVar[Literal["attention", "mlp", "blocks"]] = "attention"
    exact: ClassVar[bool] = False  # the weights compute what they did: there is nothing to fit

    @abstractmethod
    def check(self, layer: LayerShape, where: str) -> None:
        """Raise an `InputError` that begins with ``where`` if ``layer``, as it is by now, cannot be changed so."""

    @abstractmethod
    def shape(self, layer: LayerShape) -> LayerShape | None:
        """The shape of ``layer`` after this change; None where its whole block is dropped."""

    @abstractmethod
    def describe(self, layer: LayerShape) -> str:
        """The change in one short phrase; of ``layer`` only heads and widths are known."""

    @classmethod
    @abstractmethod
    def read(cls, row: Reader) -> Self:
        """This change out of a JSON file, as `facts` wrote it."""

    def facts(self) -> dict[str, Any]:
        """This change as plain data for a JSON file, without its kind."""
        values = ((item.name, getattr(self, item.name)) for item in fields(cast(Any, self)))
        return {name: value for name, value in values if value is not None}

    def entry(self) -> dict[str, Any]:
        """What the config of a reduced model says of this change, under its kind, for whoever runs the layer."""
        return {}

    def code_bits(self, layer: LayerShape) -> Digits | None:
        """Where the cache of ``layer`` is rounded: bits of the coordinates of keys and of values, digits in rows.

        Coordinates of values that stand for keys too leave a key/value head no keys of its own.
        """
        return None

    def kept_pairs(self) -> Pairs | None:
        """The RoPE pairs that each key/value head keeps, where this change names them."""
        return None

    def following(self) -> int:
        """How many blocks behind this one become one with it, when each has had its other changes."""
        return 0

    def join(self, layers: Sequence[LayerShape | None], changes: Sequence[Sequence[Change]], where: str) -> LayerShape:
        """The shape of the one block that ``layers`` become, each of which has had its ``changes``.

        An `InputError` that begins with ``where`` if they cannot.
        """
        raise TypeError(f"{self.kind} joins no blocks.")


_KNOWN: dict[str, type[Change]] = {}


def know(change: type[Change]) -> None:
    """Let plans hold changes of this kind."""
    if _KNOWN.setdefault(change.kind, change) is not change:
        raise ValueError(f"There is another kind of reduction called {change.kind!r}: {_KNOWN[change.kind]}.")


def forget(kind: str) -> None:
    """Let plans no longer hold changes of this kind."""
    _KNOWN.pop(kind, None)


def change_class(kind: str) -> type[Change]:
    """The class of the changes called ``kind``."""
    if kind not in _KNOWN:
        raise InputError(
            f"There is no kind of reduction called {kind!r}; known are {', '.join(_KNOWN)}. One from outside headwise "
            "is known once its package has been registered."
        )
    return _KNOWN[kind]


def read_change(row: Reader) -> Change:
    """A change out of a JSON file."""
    kind = row.text("kind")
    try:
        change = change_class(kind)
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from None
    return change.read(Reader({name: value for name, value in row.content.items() if name != "kind"}, row.where))


def code_digits(layer: LayerShape, changes: Iterable[Change]) -> Digits | None:
    """How the cache of ``layer`` is rounded by ``changes``; None where it is not."""
    return next((digits for change in changes if (digits := change.code_bits(layer)) is not None), None)


def joined_digits(each: Iterable[Digits]) -> Digits:
    """The digits of a layer with the key/value heads of several, whose rows stay as they are."""
    keys, values = zip(*each, strict=True)
    return tuple(row for rows in keys for row in rows), tuple(row for rows in values for row in rows)


def check_packable(layer: LayerShape, where: str) -> None:
    """Raise where the cache of ``layer`` cannot be packed."""
    _check_not_absorbed(layer, where)
    if not layer.heads or layer.cache != "tokens" or layer.window is not None:
        raise InputError(f"{where}: only layers that cache the keys and values of every token can be packed.")


def check_not_latent(layer: LayerShape, where: str) -> None:
    """Raise where ``layer`` has latent attention, whose heads and widths stay as they are."""
    if layer.latent:
        raise InputError(f"{where}: of latent attention (MLA) only the cache can be reduced, by bits.")
    _check_not_absorbed(layer, where)


def _check_not_absorbed(layer: LayerShape, where: str) -> None:
    if layer.absorbed:
        raise InputError(f"{where}: its cache holds latents already, which are not reduced further.")
