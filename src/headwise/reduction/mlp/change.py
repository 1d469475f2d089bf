"""In a plan: how many channels the MLP of a block keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change
from headwise.records.shape import LayerShape


@dataclass(frozen=True, slots=True)
class Channels(Change):
    """The ``channels`` that stay, those felt most; 0: the whole MLP goes, and the norms that it alone has."""

    kind: ClassVar[str] = "mlp"
    order: ClassVar[int] = 70
    acts_on: ClassVar[Literal["attention", "mlp"]] = "mlp"
    channels: int

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise where ``layer`` has no MLP that can be cut, or not as many channels."""
        if layer.mlp is None:
            raise InputError(f"{where}: it has no MLP whose channels could be cut.")
        if not 0 <= self.channels <= layer.mlp.channels:
            raise InputError(
                f"{where}: {self.channels} MLP channels are asked for, the model has 0 to {layer.mlp.channels}."
            )

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with so many channels."""
        return layer.with_channels(self.channels)

    def describe(self, layer: LayerShape) -> str:
        """Names the channels that are left."""
        return f"MLP {self.channels:,} channels" if self.channels else "no MLP"

    @classmethod
    def read(cls, row: Reader) -> Channels:
        """The channels out of a JSON file."""
        row.only("channels")
        return cls(row.integer("channels"))
