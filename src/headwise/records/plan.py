"""What was decided: for each layer the heads and widths to keep, and which RoPE pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headwise.files.errors import InputError
from headwise.files.reading import Reader, read_record
from headwise.files.writing import record_text, write_text
from headwise.records.blueprint import Blueprint
from headwise.records.shape import LayerShape, ModelShape, Norm

KIND = "plan"
VERSION = 2
DIMS = ("heads", "kv_heads", "qk_dim", "v_dim")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer keeps. ``heads == 0`` removes its attention, ``dropped`` the whole block.

    ``kept_heads`` lists original query heads in their new order (key/value heads follow from it); without it the
    first ones of each group are kept, or neighbouring key/value heads merged where more query heads than before are to
    share one. ``rope_pairs`` lists, for each kept key/value head, the RoPE pairs it keeps.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rope_pairs: tuple[tuple[int, ...], ...] | None = None
    kept_heads: tuple[int, ...] | None = None
    dropped: bool = False

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Heads, key/value heads, query/key width and value width."""
        return self.heads, self.kv_heads, self.qk_dim, self.v_dim

    @classmethod
    def full(cls, layer: LayerShape) -> LayerPlan:
        """The plan that changes nothing in ``layer``."""
        return cls(layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim)

    def pairs(self, layer: LayerShape) -> int:
        """RoPE pairs each head keeps: those listed, else as many of the layer's as fit into ``qk_dim``."""
        if self.rope_pairs is not None:
            return len(self.rope_pairs[0])
        return min(self.qk_dim, layer.rotary) // 2

    def norm(self, layer: LayerShape) -> Norm:
        """Kind of the norms on queries and keys: heads that keep different dimensions need weights of their own."""
        alike = self.rope_pairs is not None and len({frozenset(pairs) for pairs in self.rope_pairs}) == 1
        return "per-head" if layer.norm == "shared" and self.qk_dim < layer.qk_dim and not alike else layer.norm

    def check(self, layer: LayerShape, index: int) -> None:
        """Raise an `InputError` where ``layer`` cannot be reduced to this."""
        where = f"Layer {index} of the plan"
        for name in DIMS:
            asked, has = getattr(self, name), getattr(layer, name)
            if asked < 0:
                raise InputError(f"{where}: {name} is {asked}, it cannot be negative.")
            if asked > has:
                raise InputError(f"{where}: {name} is {asked}, the model has only {has}.")
        if layer.latent and self != LayerPlan.full(layer):
            raise InputError(f"{where}: latent attention (MLA) can be read and costed, but not reduced.")
        if self.dropped or not self.heads:
            return
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

    def merges(self, layer: LayerShape) -> bool:
        """Whether more query heads than before share a key/value head, so that key/value heads are merged."""
        return self.heads // self.kv_heads > layer.heads // layer.kv_heads

    def kept_groups(self, layer: LayerShape) -> tuple[int, ...]:
        """Original key/value heads this layer keeps, in their new order."""
        if self.kept_heads is None:
            return tuple(range(self.kv_heads))
        per_old, per_new = layer.heads // layer.kv_heads, self.heads // self.kv_heads
        return tuple(head // per_old for head in self.kept_heads[::per_new])

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


@dataclass(frozen=True, slots=True)
class Plan:
    """For each layer what to keep, for which model it was made, the budget it answers and what was predicted.

    ``profile`` names the folder of the measurements it was made from, if it was made from any, and ``fingerprint`` the
    weights of its model, if they are known. With a ``blueprint`` the model does not exist yet: the plan says what to
    build, and ``before`` is what its layers are from the start.
    """

    family: str
    width: int
    before: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]
    budget: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    profile: str = ""
    fingerprint: str = ""
    blueprint: Blueprint | None = None

    @classmethod
    def make(cls, shape: ModelShape, layers: tuple[LayerPlan, ...], **facts: Any) -> Plan:
        """A checked plan for the model of ``shape``."""
        before = tuple((layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim) for layer in shape.layers)
        plan = cls(shape.family, shape.width, before, tuple(layers), **facts)
        plan.check(shape)
        return plan

    @classmethod
    def full(cls, shape: ModelShape) -> Plan:
        """The plan that changes nothing."""
        return cls.make(shape, tuple(LayerPlan.full(layer) for layer in shape.layers))

    def require_blueprint(self) -> Blueprint:
        """The blueprint, or an `InputError` where this plan reduces a model."""
        if self.blueprint is None:
            raise InputError(
                "This plan reduces a model, it does not say how to build one; headwise design writes plans that do."
            )
        return self.blueprint

    def shape_to_build(self) -> ModelShape:
        """The exact shape of the model that this plan has a ``blueprint`` of."""
        blueprint = self.require_blueprint()
        dims = tuple(change.dims for change in self.layers)
        if self.layers != tuple(LayerPlan(*layer) for layer in dims):
            raise InputError("A model that is yet to be built has no heads, RoPE pairs or blocks to keep or drop.")
        shape = blueprint.shape(self.family, self.width, dims)
        self.check(shape)
        return shape

    def check(self, shape: ModelShape) -> None:
        """Raise an `InputError` where this plan was made for another model or cannot be built from this one."""
        if len(self.layers) != len(self.before):
            raise InputError(f"The plan has {len(self.layers)} layers but was made for {len(self.before)}.")
        found = tuple((layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim) for layer in shape.layers)
        if (self.family, self.width, self.before) != (shape.family, shape.width, found):
            raise InputError(
                f"The plan was made for another model: it expects {_describe(self.family, self.width, self.before)}, "
                f"this one is {_describe(shape.family, shape.width, found)}."
            )
        for index, (layer, change) in enumerate(zip(shape.layers, self.layers, strict=True)):
            change.check(layer, index)
        staying = (self.layers[index] for index in shape.self_attention())
        if not any(change.heads and not change.dropped for change in staying):
            raise InputError("The plan leaves no self-attention at all; at least one layer must keep some.")
        encoder_decoder = any(layer.cache == "source" for layer in shape.layers)
        if encoder_decoder and any(change.dropped for change in self.layers):
            raise InputError(
                "Whole layers cannot be dropped from an encoder-decoder; reduce or remove their attention."
            )

    def save(self, path: Path | str) -> None:
        """Write this plan as JSON, whole or not at all."""
        write_text(Path(path), self.text() + "\n")

    def text(self) -> str:
        """This plan as JSON."""
        body = asdict(self)
        body["layers"] = [
            {name: value for name, value in layer.items() if value is not None and value is not False}
            for layer in body["layers"]
        ]
        if not self.fingerprint:
            del body["fingerprint"]
        if self.blueprint is None:
            del body["blueprint"]
        else:
            del body["before"]
            body["blueprint"] = self.blueprint.body()
        return record_text(KIND, VERSION, body)

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan; a damaged or foreign file raises an `InputError` that says what was expected and found."""
        reader = read_record(Path(path), KIND, VERSION)
        reader.only("headwise", "version", *(field.name for field in fields(cls)))
        layers = tuple(_read_layer(row) for row in reader.rows("layers"))
        blueprint = Blueprint.read(reader.child("blueprint")) if reader.has("blueprint") else None
        if blueprint is None and reader.mapping("predicted"):
            _check_predicted(reader)
        return cls(
            family=reader.text("family"),
            width=reader.integer("width"),
            before=_read_before(reader) if blueprint is None else tuple(layer.dims for layer in layers),
            layers=layers,
            budget=reader.mapping("budget"),
            predicted=reader.mapping("predicted"),
            profile=reader.text("profile") if reader.has("profile") else "",
            fingerprint=reader.text("fingerprint") if reader.has("fingerprint") else "",
            blueprint=blueprint,
        )


def _read_before(reader: Reader) -> tuple[tuple[int, ...], ...]:
    before = []
    for row in reader.rows("before"):
        values = row.integers()
        if len(values) != len(DIMS):
            raise row.error(f"expected the four numbers {', '.join(DIMS)}")
        before.append(values)
    return tuple(before)


def _check_predicted(reader: Reader) -> None:
    """Raise where what `headwise plan` says of a plan that answers a budget is not there, or is no number."""
    reader.child("budget").text("dtype")
    predicted = reader.child("predicted")
    for name in ("damage", "kept"):
        predicted.number(name, least=0)
    for name in ("expected", "measured"):
        if predicted.has(name):
            predicted.number(name)
    for name in ("kv_bytes_per_token", "attention_parameters"):
        predicted.child(name).nested([2], least=0)


def _read_layer(row: Reader) -> LayerPlan:
    row.only(*(field.name for field in fields(LayerPlan)))
    pairs = row.rows("rope_pairs") if row.has("rope_pairs") else None
    return LayerPlan(
        *(row.integer(name) for name in DIMS),
        rope_pairs=None if pairs is None else tuple(inner.integers() for inner in pairs),
        kept_heads=row.child("kept_heads").integers() if row.has("kept_heads") else None,
        dropped=row.flag("dropped"),
    )


def _describe(family: str, width: int, layers: tuple[tuple[int, ...], ...]) -> str:
    shapes = sorted({"/".join(map(str, layer)) for layer in layers})
    listed = ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "")  # noqa: PLR2004
    return f"{family} of width {width} with {len(layers)} attention layers ({'/'.join(DIMS)} = {listed})"
