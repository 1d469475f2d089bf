"""What was decided: for each layer the changes to be made, for which model, and what was predicted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from headwise.files.errors import InputError
from headwise.files.reading import Reader, read_record
from headwise.files.writing import record_text, write_text
from headwise.records.blueprint import Blueprint
from headwise.records.budget import WORDS, check_budget
from headwise.records.change import Change, Pairs, change_class, read_change
from headwise.records.rendering import Shown
from headwise.records.shape import DIMS, Dims, LayerShape, ModelShape

KIND = "plan"
VERSION = 3
LAST_OF_WIDTHS = 2  # versions up to this one held a `LayerPlan` for each layer
RENAMED = {"damage": "loss_increase", "max_damage": "max_loss_increase"}
Changes = tuple[Change, ...]


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


@dataclass(frozen=True, slots=True)
class Plan(Shown):
    """For each layer its changes, for which model they were made, the budget they answer and what was predicted.

    ``before`` are the heads and widths of that model's layers. ``profile`` names the folder of the measurements the
    plan was made from, if it was made from any, and ``fingerprint`` the weights of its model, if they are known. With
    a ``blueprint`` the model does not exist yet: there is nothing to change, and ``before`` says what to build.
    """

    family: str
    width: int
    before: tuple[Dims, ...]
    layers: tuple[Changes, ...]
    budget: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    profile: str = ""
    fingerprint: str = ""
    blueprint: Blueprint | None = None

    @classmethod
    def make(cls, shape: ModelShape, layers: Iterable[LayerPlan | Change | Iterable[Change]], **facts: Any) -> Plan:
        """A checked plan for the model of ``shape``; for each layer its changes, one change, or a `LayerPlan`."""
        given = tuple(layers)
        if len(given) != len(shape.layers):
            raise InputError(f"The plan has {len(given)} layers but was made for {len(shape.layers)}.")
        changes = tuple(_changes(each, layer.dims) for each, layer in zip(given, shape.layers, strict=True))
        plan = cls(shape.family, shape.width, tuple(layer.dims for layer in shape.layers), changes, **facts)
        plan.check(shape)
        return plan

    @classmethod
    def full(cls, shape: ModelShape) -> Plan:
        """The plan that changes nothing."""
        return cls.make(shape, ((),) * len(shape.layers))

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
        shape = blueprint.shape(self.family, self.width, self.before)
        self.check(shape)
        return shape

    def check(self, shape: ModelShape) -> None:
        """Raise an `InputError` where this plan was made for another model or cannot be carried out on this one."""
        if len(self.layers) != len(self.before):
            raise InputError(f"The plan has {len(self.layers)} layers but was made for {len(self.before)}.")
        dims = tuple(layer.dims for layer in shape.layers)
        if (self.family, self.width, self.before) != (shape.family, shape.width, dims):
            raise InputError(
                f"The plan was made for another model: it expects {_describe(self.family, self.width, self.before)}, "
                f"this one is {_describe(shape.family, shape.width, dims)}."
            )
        if self.blueprint is not None and any(self.layers):
            raise InputError("A model that is yet to be built has no heads, RoPE pairs or blocks to keep or drop.")
        after = [
            _checked(layer, changes, f"Layer {index} of the plan")
            for index, (layer, changes) in enumerate(zip(shape.layers, self.layers, strict=True))
        ]
        after = self._joined(after)
        if not any(layer is not None and layer.heads for layer in (after[index] for index in shape.self_attention())):
            raise InputError("The plan leaves no self-attention at all; at least one layer must keep some.")
        if any(layer.cache == "source" for layer in shape.layers) and None in after:
            raise InputError(
                "Whole layers cannot be dropped from an encoder-decoder; reduce or remove their attention."
            )

    def after(self, shape: ModelShape) -> tuple[LayerShape | None, ...]:
        """What each layer of the model of ``shape`` is after this plan; None where its block is gone or joined."""
        return tuple(self._joined([changed(*each) for each in zip(shape.layers, self.layers, strict=True)]))

    def made_of(self) -> tuple[tuple[int, ...], ...]:
        """For each block that is left the numbers of those it is made of: its own, then any that are joined to it."""
        layers = zip(self.before, self.layers, strict=True)
        dropped = [changed(LayerShape(*dims), changes) is None for dims, changes in layers]
        return tuple(run for run in runs(self.layers) if not dropped[run[0]])

    def describe(self) -> tuple[str, ...]:
        """What is done to each layer in a short phrase; "" where nothing is."""
        layers = zip(self.before, self.layers, strict=True)
        phrases = [describe(LayerShape(*dims), changes) for dims, changes in layers]
        for first, *others in runs(self.layers):
            for number in others:
                phrases[number] = "; ".join(filter(None, (phrases[number], f"joined to {first}")))
        return tuple(phrases)

    def _joined(self, layers: Sequence[LayerShape | None]) -> list[LayerShape | None]:
        """``layers``, which have had their own changes, with those that become one where the first of them was."""
        after: list[LayerShape | None] = [None] * len(layers)
        for run in runs(self.layers):
            first = run[0]
            joining = next((change for change in self.layers[first] if change.following()), None)
            if joining is None:
                after[first] = layers[first]
                continue
            where = f"Layer {first} of the plan"
            if run[-1] >= len(layers):
                raise InputError(f"{where}: {len(run) - 1} blocks behind it are to be joined to it; there are fewer.")
            nested = [n for n in run[1:] if any(change.following() for change in self.layers[n])]
            if nested:
                raise InputError(f"{where}: layer {nested[0]} is joined to it and cannot have others joined to itself.")
            changes = [self.layers[number] for number in run]
            after[first] = joining.join([layers[number] for number in run], changes, where)
        return after

    def save(self, path: Path | str) -> None:
        """Write this plan as JSON, whole or not at all."""
        write_text(Path(path), self.text() + "\n")

    def text(self) -> str:
        """This plan as JSON."""
        body = {item.name: getattr(self, item.name) for item in fields(self)}
        body["layers"] = [
            {"changes": [{"kind": change.kind, **change.facts()} for change in changes]} for changes in self.layers
        ]
        if not self.fingerprint:
            del body["fingerprint"]
        if self.blueprint is None:
            del body["blueprint"]
        else:
            del body["before"]
            body["layers"] = [dict(zip(DIMS, dims, strict=True)) for dims in self.before]
            body["blueprint"] = self.blueprint.body()
        return record_text(KIND, VERSION, body)

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read a plan; a damaged or foreign file raises an `InputError` that says what was expected and found."""
        reader = read_record(Path(path), KIND, VERSION)
        reader.only("headwise", "version", *(item.name for item in fields(cls)))
        old = reader.integer("version") <= LAST_OF_WIDTHS
        blueprint = Blueprint.read(reader.child("blueprint")) if reader.has("blueprint") else None
        if blueprint is None:
            before = _read_before(reader)
            layers = _read_old(reader, before) if old else tuple(map(_read_changes, reader.rows("layers")))
        else:
            before = _read_to_build(reader)
            layers = ((),) * len(before)
        budget, predicted = (
            {RENAMED.get(key, key) if old else key: value for key, value in reader.mapping(name).items()}
            for name in ("budget", "predicted")
        )
        if blueprint is None:
            check_budget(Reader(budget, f"{path}, budget"))
        if blueprint is None and predicted:
            _check_predicted(Reader(budget, f"{path}, budget"), Reader(predicted, f"{path}, predicted"), len(before))
        return cls(
            family=reader.text("family"),
            width=reader.integer("width"),
            before=before,
            layers=layers,
            budget=budget,
            predicted=predicted,
            profile=reader.text("profile") if reader.has("profile") else "",
            fingerprint=reader.text("fingerprint") if reader.has("fingerprint") else "",
            blueprint=blueprint,
        )


def changed(layer: LayerShape, changes: Iterable[Change]) -> LayerShape | None:
    """The shape of ``layer`` after ``changes``; None where its block is dropped."""
    after: LayerShape | None = layer
    for change in changes:
        after = None if after is None else change.shape(after)
    return after


def describe(layer: LayerShape, changes: Iterable[Change]) -> str:
    """What ``changes`` do to ``layer`` in a short phrase; "" where there are none."""
    phrases, after = [], layer
    for change in changes:
        phrases.append(change.describe(after))
        after = change.shape(after) or after
    return "; ".join(phrases)


def runs(layers: Sequence[Changes]) -> Iterator[tuple[int, ...]]:
    """The numbers of all layers, those together that become one block."""
    number = 0
    while number < len(layers):
        count = 1 + sum(change.following() for change in layers[number])
        yield tuple(range(number, number + count))
        number += count


def in_order(changes: Iterable[Change]) -> Changes:
    """``changes`` of one layer in the order in which they are applied."""
    return tuple(sorted(changes, key=lambda change: (change.order, change.kind)))


def _changes(given: LayerPlan | Change | Iterable[Change], before: Dims) -> Changes:
    if isinstance(given, LayerPlan):
        return given.changes(before)
    return in_order((given,) if isinstance(given, Change) else given)


def _checked(layer: LayerShape, changes: Changes, where: str) -> LayerShape | None:
    kinds = [change.kind for change in changes]
    if len(set(kinds)) < len(kinds) or changes != in_order(changes):
        raise InputError(f"{where}: expected changes of different kinds in their order, found {', '.join(kinds)}.")
    after: LayerShape | None = layer
    for change in changes:
        if after is None:
            raise InputError(f"{where}: nothing is left for {change.kind}, its block is dropped.")
        change.check(after, where)
        after = change.shape(after)
    return after


def _read_before(reader: Reader) -> tuple[Dims, ...]:
    before = []
    for row in reader.rows("before"):
        values = row.integers(least=0)
        if len(values) != len(DIMS):
            raise row.error(f"expected the four numbers {', '.join(DIMS)}")
        before.append(cast(Dims, values))
    return tuple(before)


def _read_changes(row: Reader) -> Changes:
    row.only("changes")
    return in_order(read_change(change) for change in row.rows("changes"))


def _read_old(reader: Reader, before: Sequence[Dims]) -> tuple[Changes, ...]:
    """The changes of a plan of version 1 or 2."""
    layers = [LayerPlan.read(row) for row in reader.rows("layers")]
    if len(layers) != len(before):
        raise InputError(f"The plan has {len(layers)} layers but was made for {len(before)}.")
    return tuple(layer.changes(dims) for layer, dims in zip(layers, before, strict=True))


def _read_to_build(reader: Reader) -> tuple[Dims, ...]:
    """The heads and widths of the layers of a model that is yet to be built."""
    layers = [LayerPlan.read(row) for row in reader.rows("layers")]
    if any(layer != LayerPlan(*layer.dims) for layer in layers):
        raise InputError("A model that is yet to be built has no heads, RoPE pairs or blocks to keep or drop.")
    return tuple(layer.dims for layer in layers)


def _check_predicted(budget: Reader, predicted: Reader, layers: int) -> None:
    """Raise where what `headwise plan` says of a plan that answers a budget is not there, or is no number."""
    budget.text("dtype")
    for name in ("loss_increase", "kept"):
        predicted.number(name, least=0)
    for name in predicted.mapping("also"):
        predicted.child("also").only(*WORDS)
        predicted.child("also").number(name, least=0)
    for name in ("expected", "measured"):
        if predicted.has(name):
            predicted.number(name)
    for name in ("kv_bytes_per_token", "attention_parameters"):
        predicted.child(name).nested([2], least=0)
    if predicted.has("by_layer"):
        predicted.child("by_layer").nested([layers], least=0)


def _describe(family: str, width: int, layers: Sequence[Dims]) -> str:
    shapes = sorted({"/".join(map(str, layer)) for layer in layers})
    listed = ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "")  # noqa: PLR2004
    return f"{family} of width {width} with {len(layers)} attention layers ({'/'.join(DIMS)} = {listed})"
