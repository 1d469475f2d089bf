"""In a plan: the heads and widths that a layer keeps, and which RoPE pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, Pairs, check_not_latent
from headwise.records.shape import DIMS, Dims, LayerShape, Norm

WORDS = ("heads", "kv heads", "qk dim", "v dim")


@dataclass(frozen=True, slots=True)
class Widths(Change):
    """What one layer keeps.

    ``kept_heads`` lists original query heads in their new order (key/value heads follow from it); without it the
    first ones of each group are kept, or neighbouring key/value heads merged where more query heads than before are to
    share one. ``rope_pairs`` lists, for each kept key/value head, the RoPE pairs it keeps.
    """

    kind: ClassVar[str] = "widths"
    order: ClassVar[int] = 40
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope_pairs: Pairs | None = None
    kept_heads: tuple[int, ...] | None = None

    @property
    def dims(self) -> Dims:
        """Heads, key/value heads, query/key width and value width."""
        return self.heads, self.kv_heads, self.qk_dim, self.v_dim

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with these heads and widths."""
        return replace(
            layer,
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            rotary=2 * self.pairs(layer),
            norm=self.norm(layer),
        )

    def describe(self, layer: LayerShape) -> str:
        """Names every number that is smaller than before."""
        numbers = zip(WORDS, layer.dims, self.dims, strict=True)
        return ", ".join(f"{name} {old} > {new}" for name, old, new in numbers if old != new) or "heads reordered"

    @classmethod
    def read(cls, row: Reader) -> Widths:
        """Heads and widths out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        pairs = row.rows("rope_pairs") if row.has("rope_pairs") else None
        return cls(
            *(row.integer(name) for name in DIMS),
            rope_pairs=None if pairs is None else tuple(inner.integers() for inner in pairs),
            kept_heads=row.child("kept_heads").integers() if row.has("kept_heads") else None,
        )

    def kept_pairs(self) -> Pairs | None:
        """The RoPE pairs that are named."""
        return self.rope_pairs

    def pairs(self, layer: LayerShape) -> int:
        """RoPE pairs each head keeps: those listed, else as many of the layer's as fit into ``qk_dim``."""
        if self.rope_pairs is not None:
            return len(self.rope_pairs[0])
        return min(self.qk_dim, layer.rotary) // 2

    def norm(self, layer: LayerShape) -> Norm:
        """Kind of the norms on queries and keys: heads that keep different dimensions need weights of their own."""
        alike = self.rope_pairs is not None and len({frozenset(pairs) for pairs in self.rope_pairs}) == 1
        return "per-head" if layer.norm == "shared" and self.qk_dim < layer.qk_dim and not alike else layer.norm

    def narrower(self, layer: LayerShape) -> bool:
        """Whether heads lose dimensions, and not only whole heads go."""
        return self.qk_dim < layer.qk_dim or self.v_dim < layer.v_dim

    def merges(self, layer: LayerShape) -> bool:
        """Whether more query heads than before share a key/value head, so that key/value heads are merged."""
        return self.heads // self.kv_heads > layer.heads // layer.kv_heads

    def kept_groups(self, layer: LayerShape) -> tuple[int, ...]:
        """Original key/value heads this layer keeps, in their new order."""
        if self.kept_heads is None:
            return tuple(range(self.kv_heads))
        per_old, per_new = layer.heads // layer.kv_heads, self.heads // self.kv_heads
        return tuple(head // per_old for head in self.kept_heads[::per_new])

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise an `InputError` where ``layer`` cannot be reduced to this."""
        check_not_latent(layer, where)
        for name in DIMS:
            wanted, has = getattr(self, name), getattr(layer, name)
            if wanted < 0:
                raise InputError(f"{where}: {name} is {wanted}, it cannot be negative.")
            if wanted > has:
                raise InputError(f"{where}: {name} is {wanted}, the model has only {has}.")
        if not self.heads:
            raise InputError(f"{where}: heads is 0; an attention without heads is one that is removed.")
        if not (self.kv_heads and self.qk_dim and self.v_dim):
            raise InputError(f"{where}: {self.heads} heads need kv_heads, qk_dim and v_dim of at least 1.")
        if self.heads % self.kv_heads:
            raise InputError(f"{where}: {self.heads} query heads cannot share {self.kv_heads} key/value heads evenly.")
        if layer.norm == "affine" and self.qk_dim < layer.qk_dim:
            raise InputError(f"{where}: qk_dim cannot be cut below a norm with biases on queries and keys.")
        self._check_kept_heads(layer, where)
        self._check_pairs(layer, where)

    def _check_kept_heads(self, layer: LayerShape, where: str) -> None:
        if self.kept_heads is None:
            if self.merges(layer) and (self.heads != layer.heads or layer.kv_heads % self.kv_heads):
                raise InputError(
                    f"{where}: {self.heads} query heads on {self.kv_heads} key/value heads mean merging the "
                    f"{layer.kv_heads} key/value heads of the model, which needs all {layer.heads} query heads and a "
                    f"divisor of {layer.kv_heads}."
                )
            return
        if len(self.kept_heads) != self.heads or len(set(self.kept_heads)) != self.heads:
            raise InputError(
                f"{where}: kept_heads must list {self.heads} different heads, got {list(self.kept_heads)}."
            )
        if not all(0 <= head < layer.heads for head in self.kept_heads):
            raise InputError(f"{where}: kept_heads must lie between 0 and {layer.heads - 1}.")
        groups = self.kept_groups(layer)
        if len(set(groups)) != self.kv_heads:
            raise InputError(f"{where}: two new key/value heads would come from the same old one.")
        per_old, per_new = layer.heads // layer.kv_heads, self.heads // self.kv_heads
        if any(head // per_old != groups[i // per_new] for i, head in enumerate(self.kept_heads)):
            raise InputError(f"{where}: query heads that share a new key/value head must have shared one before.")

    def _check_pairs(self, layer: LayerShape, where: str) -> None:
        if not layer.rotary:
            if self.rope_pairs is not None:
                raise InputError(f"{where}: rope_pairs are given, but this model has no rotary positions.")
            return
        if self.rope_pairs is not None:
            if len(self.rope_pairs) != self.kv_heads or len({len(pairs) for pairs in self.rope_pairs}) != 1:
                raise InputError(
                    f"{where}: rope_pairs must hold {self.kv_heads} lists of one length, one per key/value head."
                )
            for pairs in self.rope_pairs:
                if len(set(pairs)) != len(pairs) or not all(0 <= pair < layer.rotary // 2 for pair in pairs):
                    raise InputError(
                        f"{where}: rope_pairs must be different numbers between 0 and {layer.rotary // 2 - 1}."
                    )
        free, free_before = self.qk_dim - 2 * self.pairs(layer), layer.qk_dim - layer.rotary
        if free < 0 or free > free_before:
            raise InputError(
                f"{where}: qk_dim {self.qk_dim} does not fit: rotary positions keep whole pairs of dimensions, and "
                f"this layer has {layer.rotary} rotary and {free_before} free ones"
                + (" (an odd rotary width cuts a pair in half)." if self.qk_dim % 2 else ".")
            )
