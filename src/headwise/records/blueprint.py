"""The parts around the attention of a model to be built from scratch, and its exact shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.shape import LayerShape, MlpShape, ModelShape


@dataclass(frozen=True, slots=True)
class Text:
    """A decoder's ends: a vocabulary in and out (one matrix if ``tied``), and its longest context."""

    vocab: int
    context: int
    tied: bool

    def __post_init__(self) -> None:
        _at_least_one(vocab=self.vocab, context=self.context)

    @property
    def tokens(self) -> int:
        """Tokens in the longest input."""
        return self.context


@dataclass(frozen=True, slots=True)
class Images:
    """A classifier's ends: square images cut into square patches, and the labels they get."""

    size: int
    patch: int
    channels: int
    labels: int

    def __post_init__(self) -> None:
        _at_least_one(**asdict(self))
        if self.size % self.patch:
            raise InputError(f"Images of {self.size} pixels cannot be cut into patches of {self.patch}.")

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.size // self.patch) ** 2 + 1


@dataclass(frozen=True, slots=True)
class Builds:
    """The parts of a family that cost parameters: kind of inputs, norms with biases, a gated MLP."""

    reads: type[Text | Images]
    rotary: bool = False
    biased: bool = True
    gated: bool = False


BUILDABLE = {
    "llama": Builds(Text, rotary=True, biased=False, gated=True),
    "gpt2": Builds(Text),
    "vit": Builds(Images),
}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The width of every MLP and the two ends of a model that is to be built from scratch."""

    mlp: int
    reads: Text | Images

    def __post_init__(self) -> None:
        _at_least_one(mlp=self.mlp)

    def shape(self, family: str, width: int, dims: Sequence[Sequence[int]]) -> ModelShape:
        """The model of ``width`` whose attention layers have these ``heads, kv_heads, qk_dim, v_dim``."""
        builds = builds_of(family, self.reads)
        _at_least_one(width=width, layers=len(dims))
        norm = (1 + builds.biased) * width
        per_channel = (2 + builds.gated) * width
        mlp = MlpShape(self.mlp, per_channel, per_channel + builds.biased, norm + width * builds.biased)
        layers = tuple(
            LayerShape(
                *layer,
                rotary=layer[2] if builds.rotary else 0,
                biases="qkvo" if builds.biased and layer[0] else "",
                own_norm=norm if layer[0] else 0,
                cache="tokens" if builds.reads is Text else "none",
                rest_parameters=self.mlp * mlp.parameters + mlp.own,
                rest_matmul=self.mlp * mlp.matmul,
                mlp=mlp,
            )
            for layer in dims
        )
        return ModelShape(family, width, layers, max_tokens=self.reads.tokens, **self._ends(builds, width, norm))

    def _ends(self, builds: Builds, width: int, norm: int) -> dict[str, int]:
        """Parameters and products outside the blocks."""
        reads = self.reads
        if isinstance(reads, Text):
            embedding = reads.vocab * width
            positions = 0 if builds.rotary else reads.context * width
            return {"outside_parameters": embedding * (2 - reads.tied) + positions + norm, "outside_matmul": embedding}
        pixels = reads.channels * reads.patch**2 * width
        embeddings = pixels + width + (1 + reads.tokens) * width  # patches, class token, positions
        head = (width + 1) * reads.labels
        return {"outside_parameters": embeddings + norm + head, "outside_matmul": 0, "input_matmul": pixels}

    def body(self) -> dict[str, Any]:
        """This blueprint as plain data for a JSON file."""
        return {"mlp": self.mlp, type(self.reads).__name__.lower(): asdict(self.reads)}

    @classmethod
    def read(cls, reader: Reader) -> Blueprint:
        """A blueprint out of a JSON file."""
        reader.only("mlp", "text", "images")
        if reader.has("text"):
            return cls(reader.integer("mlp"), _read_text(reader.child("text")))
        images = reader.child("images")
        names = [field.name for field in fields(Images)]
        images.only(*names)
        return cls(reader.integer("mlp"), Images(*(images.integer(name) for name in names)))


def builds_of(family: str, reads: Text | Images) -> Builds:
    """The parts of a model of ``family``, if it can be built and reads such inputs."""
    builds = BUILDABLE.get(family)
    if builds is None:
        raise InputError(f"Models of {family} cannot be built from scratch; {', '.join(BUILDABLE)} can.")
    if not isinstance(reads, builds.reads):
        raise InputError(f"A {family} model reads {builds.reads.__name__.lower()}, not {type(reads).__name__.lower()}.")
    return builds


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"A model cannot be built with {name} {value}; the least is 1.")


def _read_text(reader: Reader) -> Text:
    reader.only(*(field.name for field in fields(Text)))
    return Text(reader.integer("vocab"), reader.integer("context"), reader.flag("tied"))
