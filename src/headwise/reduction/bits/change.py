"""In a plan: the bits that each cached coordinate of a layer gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, check_packable
from headwise.records.packing import bits_of, check_digits, packed_of
from headwise.records.shape import LayerShape

Digits = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bits(Change):
    """One digit a coordinate: how many bits it gets in the cache, 0 for none, g for 16.

    Keys are counted before RoPE, a row for each key/value head in the model's own order; values in the coordinates that
    the profile of the model names, a row for each group of heads that shares them. Latent attention has one row each,
    for the key that its heads share and for its latent.
    """

    kind: ClassVar[str] = "bits"
    order: ClassVar[int] = 60
    exact: ClassVar[bool] = True
    keys: Digits
    values: Digits

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise where ``layer`` caches other coordinates than these, or none."""
        check_packable(layer, where)
        cached, groups = layer.cached, len(self.values)
        G, K, V = cached.kv_heads, cached.qk_dim, cached.v_dim
        if len(self.keys) != G or any(len(row) != K for row in self.keys):
            raise InputError(f"{where}: keys must hold {G} rows of {K} digits.")
        if not groups or G % groups or any(len(row) != G // groups * V for row in self.values):
            raise InputError(f"{where}: values must hold {G} rows of {V} digits, or fewer and longer ones.")
        check_digits("keys", self.keys, where)
        check_digits("values", self.values, where)

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with a packed cache."""
        return replace(layer, packed=packed_of(bits_of("".join((*self.keys, *self.values)))))

    def describe(self, layer: LayerShape) -> str:
        """Mean bits of keys and of values."""
        means = (sum(bits_of(row)) / len(row) for row in ("".join(self.keys), "".join(self.values)))
        return "keys {:.1f}, values {:.1f} bits".format(*means)

    def code_bits(self, layer: LayerShape) -> tuple[Digits, Digits]:
        """Of keys and of values."""
        return self.keys, self.values

    @classmethod
    def read(cls, row: Reader) -> Bits:
        """Bits out of a JSON file."""
        row.only("keys", "values")
        return cls(*(row.texts(name) for name in ("keys", "values")))
