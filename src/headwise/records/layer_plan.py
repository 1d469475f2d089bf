"""What one layer keeps, in short: heads, key/value heads, query/key width, value width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import cast

from headwise.files.reading import Reader
from headwise.records.change import Change, Pairs, change_class
from headwise.records.shape import DIMS, Dims, LayerShape


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Short notation for the changes of one layer, which `Plan.make` spells out; plans before version 3 held these.

    ``heads == 0`` removes the attention, ``dropped`` the whole block. ``kept_heads`` lists original query heads in
    their new order (key/value heads follow from it); without it the first ones of each group are kept, or neighbouring
    key/value heads merged where more query heads than before are to share one. ``rope_pairs`` lists, for each kept
    key/value head, the RoPE pairs it keeps.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope_pairs: Pairs | None = None
    kept_heads: tuple[int, ...] | None = None
    dropped: bool = False

    @property
    def dims(self) -> Dims:
        """Heads, key/value heads, query/key width and value width."""
        return self.heads, self.kv_heads, self.qk_dim, self.v_dim

    @classmethod
    def full(cls, layer: LayerShape) -> LayerPlan:
        """The notation that changes nothing in ``layer``."""
        return cls(*layer.dims)

    def changes(self, before: Dims) -> tuple[Change, ...]:
        """The changes that this asks for in a layer whose `dims` are ``before``."""
        widths, removal = (cast(Callable[..., Change], change_class(kind)) for kind in ("widths", "removal"))
        if self.dropped:
            return (removal("block"),)
        if self == LayerPlan(*before):
            return ()
        if not self.heads and min(self.dims) >= 0:
            return (removal("attention"),)
        return (widths(*self.dims, self.rope_pairs, self.kept_heads),)

    @classmethod
    def read(cls, row: Reader) -> LayerPlan:
        """What a plan of version 1 or 2, or one of a model yet to be built, says of a layer."""
        row.only(*(item.name for item in fields(cls)))
        pairs = row.rows("rope_pairs") if row.has("rope_pairs") else None
        return cls(
            *(row.integer(name) for name in DIMS),
            rope_pairs=None if pairs is None else tuple(inner.integers() for inner in pairs),
            kept_heads=row.child("kept_heads").integers() if row.has("kept_heads") else None,
            dropped=row.flag("dropped"),
        )
