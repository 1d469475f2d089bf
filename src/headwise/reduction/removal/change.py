"""In a plan: a layer that loses its attention, or its whole block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, check_not_latent
from headwise.records.shape import LayerShape

Part = Literal["attention", "block"]


@dataclass(frozen=True, slots=True)
class Removal(Change):
    """What goes: the "attention" with the norms that serve it alone, or the "block" with everything in it."""

    kind: ClassVar[str] = "removal"
    order: ClassVar[int] = 20
    part: Part

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise where ``layer`` is latent or has nothing to remove."""
        check_not_latent(layer, where)
        if self.part not in get_args(Part):
            raise InputError(f"{where}: {self.part!r} cannot be removed, only {' or '.join(get_args(Part))}.")
        if self.part == "attention" and not layer.heads:
            raise InputError(f"{where}: there is no attention left to remove.")

    def shape(self, layer: LayerShape) -> LayerShape | None:
        """``layer`` without attention, or None."""
        if self.part == "block":
            return None
        return replace(
            layer, heads=0, kv_heads=0, qk_dim=0, v_dim=0, rotary=0, window=None, biases="", norm="none", own_norm=0
        )

    def describe(self, layer: LayerShape) -> str:
        """Says what is gone."""
        return "no attention" if self.part == "attention" else "block dropped"

    @classmethod
    def read(cls, row: Reader) -> Removal:
        """A removal out of a JSON file."""
        row.only("part")
        return cls(row.choice("part", get_args(Part)))
