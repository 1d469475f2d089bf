"""How long a model takes to decode a token: a sum over its layers, with rates that were measured on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from headwise.files.reading import Reader, read_record
from headwise.files.writing import record_text, write_text
from headwise.records.shape import LayerShape, ModelShape

KIND = "timing"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Nanoseconds for each unit of `decode_work`, measured on ``device`` in ``dtype`` after ``context`` tokens.

    ``outside`` is what a token takes outside of all blocks. ``whole`` names attention that stays as it is, for which
    kernels may be slow or fast for reasons of their own, and what a block with it takes without the rest of the block.
    ``error`` says how far the measured layers were from the rates on average, as a share of their time.
    """

    device: str
    dtype: str
    context: int
    outside: float
    rates: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0

    def of_layer(self, layer: LayerShape, shape: ModelShape) -> int:
        """Nanoseconds of one layer with its block: a sum of two, so that attention and MLP can be planned apart."""
        work = decode_work(layer, shape, self.context)
        attention = self.whole.get(work_key(work))
        if attention is None:
            attention = sum(self.rates.get(name, 0.0) * amount for name, amount in work.items())
        return round(attention) + round(self.rates.get("weights", 0.0) * layer.rest_matmul)

    def of_model(self, shape: ModelShape) -> int:
        """Nanoseconds of one token."""
        return round(self.outside) + sum(self.of_layer(layer, shape) for layer in shape.layers)

    def save(self, path: Path) -> None:
        """Write these rates as JSON, whole or not at all."""
        write_text(path, record_text(KIND, VERSION, {item.name: getattr(self, item.name) for item in fields(self)}))

    @classmethod
    def load(cls, path: Path) -> Timing:
        """Read rates that `save` wrote."""
        reader = read_record(path, KIND, VERSION)
        reader.only("headwise", "version", *(item.name for item in fields(cls)))
        rates, whole = (
            {key: Reader(value, f"{path}, {name}").as_number() for key, value in reader.mapping(name).items()}
            for name in ("rates", "whole")
        )
        return cls(
            reader.text("device"),
            reader.text("dtype"),
            reader.integer("context", least=1),
            reader.number("outside", least=0),
            rates,
            whole,
            reader.number("error", least=0),
        )


def work_key(work: Mapping[str, float]) -> str:
    """Tells work from other work."""
    return " ".join(f"{name}={amount}" for name, amount in work.items())


def decode_work(layer: LayerShape, shape: ModelShape, context: int) -> dict[str, float]:
    """What attention does for one token after ``context`` others, in units that take time of their own."""
    work: dict[str, float] = {"block": 1, "weights": layer.matmul_weights(shape.width)}
    if not layer.heads:
        return work
    tokens, packed = layer.cached_tokens(context, shape.source_tokens), layer.packed
    if layer.absorbed:
        return work | {
            "absorbed": 1,
            "absorbed numbers": tokens * layer.cached_per_token,
            "absorbed products": 2 * tokens * layer.heads * (layer.absorbed.pairs + layer.absorbed.rank),
            "absorbed scores": tokens * layer.heads,
        }
    if packed is None:
        return work | {
            "dense": 1,
            "dense numbers": tokens * layer.cached_per_token,
            "dense scores": tokens * layer.heads,
        }
    name = "latent" if packed.rebuilding else "packed"
    work |= {name: 1, f"{name} coordinates": tokens * packed.live, f"{name} scores": tokens * layer.heads}
    return work | ({"latent keys": tokens * packed.rebuilding} if packed.rebuilding else {})
