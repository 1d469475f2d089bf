"""In a plan: the bits of each coordinate of the joint latent that a layer caches instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, check_not_latent, check_packable
from headwise.records.packing import bits_of, check_digits, packed_of
from headwise.records.shape import LayerShape


@dataclass(frozen=True, slots=True)
class Latent(Change):
    """One digit a coordinate: how many bits it gets in the cache, 0 for none, g for 16.

    A row for each group of key/value heads, as wide as their keys and values together, in the coordinates that the
    profile of the model names.
    """

    kind: ClassVar[str] = "latent"
    order: ClassVar[int] = 50
    exact: ClassVar[bool] = True
    coordinates: tuple[str, ...]

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise where ``layer`` caches something else than keys and values as wide as these."""
        check_not_latent(layer, where)
        check_packable(layer, where)
        groups = len(self.coordinates)
        if not groups or layer.kv_heads % groups:
            raise InputError(f"{where}: {groups} rows of coordinates do not fit {layer.kv_heads} key/value heads.")
        width = layer.kv_heads // groups * (layer.qk_dim + layer.v_dim)
        if any(len(row) != width for row in self.coordinates):
            raise InputError(f"{where}: {groups} rows of coordinates must hold {width} digits each.")
        check_digits("coordinates", self.coordinates, where)

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with a packed cache."""
        packed = packed_of(bits_of("".join(self.coordinates)), loud=1)
        live = max(len(row) - row.count("0") for row in self.coordinates)  # of every group, that products are alike
        return replace(layer, packed=replace(packed, rebuilding=live * layer.kv_heads * layer.qk_dim))

    def describe(self, layer: LayerShape) -> str:
        """Coordinates that are cached, and their mean bits."""
        kept = [bits for bits in bits_of("".join(self.coordinates)) if bits]
        return f"latent of {len(kept)}, {sum(kept) / max(1, len(kept)):.1f} bits"

    def code_bits(self, layer: LayerShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """No keys of their own, and what stands for keys and values."""
        return ("",) * layer.kv_heads, self.coordinates

    @classmethod
    def read(cls, row: Reader) -> Latent:
        """A latent out of a JSON file."""
        row.only("coordinates")
        return cls(row.texts("coordinates"))
