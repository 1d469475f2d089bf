"""In a plan: how many of the blocks behind a block become one with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, check_not_latent, code_digits, joined_digits
from headwise.records.packing import Packed, bits_of, packed_of
from headwise.records.shape import LayerShape, MlpShape


@dataclass(frozen=True, slots=True)
class Flatten(Change):
    """The next ``blocks`` run side by side with this one: the heads of all, then the MLPs of all, are added up.

    Every block first has its other changes. What each half still has must fit into one block: heads of the same widths,
    as many query heads for each key/value head.
    """

    kind: ClassVar[str] = "flatten"
    order: ClassVar[int] = 80
    acts_on: ClassVar[Literal["attention", "mlp", "blocks"]] = "blocks"
    blocks: int = 1

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise where no block is joined."""
        if self.blocks < 1:
            raise InputError(f"{where}: at least one block must be joined to it, got {self.blocks}.")

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer``: what it becomes with the others is what `join` says."""
        return layer

    def describe(self, layer: LayerShape) -> str:
        """Says how many blocks follow into this one."""
        return f"joined by the next {f'{self.blocks} blocks' if self.blocks > 1 else 'block'}"

    def following(self) -> int:
        """The blocks that join this one."""
        return self.blocks

    def join(self, layers: Sequence[LayerShape | None], changes: Sequence[Sequence[Change]], where: str) -> LayerShape:
        """The block with the heads and the channels of all ``layers``."""
        members = [layer for layer in layers if layer is not None]
        if len(members) < len(layers):
            raise InputError(f"{where}: a block that is dropped cannot be joined.")
        for layer in members:
            _check_joins(layer, where)
        _require_alike([layer.cache for layer in members], "cache the same tokens", where)
        around = [_around(layer) for layer in members]
        _require_alike(around, "have the same norms", where)
        attending = [layer for layer in members if layer.heads]
        first = attending[0] if attending else members[0]
        for what, values in (
            ("heads of one width", [(layer.qk_dim, layer.v_dim, layer.rotary) for layer in attending]),
            ("as many query heads for each key/value head", [layer.heads // layer.kv_heads for layer in attending]),
            ("the same window", [layer.window for layer in attending]),
            ("the same biases and norms", [(layer.biases, layer.norm == "none") for layer in attending]),
        ):
            _require_alike(values, f"have {what}", where)
        mlp = _joined_mlp([layer.mlp for layer in members if layer.mlp is not None], where)
        channels, own = (0, 0) if mlp is None else (mlp.channels, mlp.own)
        return replace(
            first,
            heads=sum(layer.heads for layer in members),
            kv_heads=sum(layer.kv_heads for layer in members),
            norm="none" if first.norm == "none" else "per-head",
            packed=_joined_cache(layers, changes, where),
            rest_parameters=around[0] + own + (0 if mlp is None else channels * mlp.parameters),
            rest_matmul=0 if mlp is None else channels * mlp.matmul,
            mlp=mlp,
        )

    @classmethod
    def read(cls, row: Reader) -> Flatten:
        """The number of blocks out of a JSON file."""
        row.only("blocks")
        return cls(row.integer("blocks"))


def _check_joins(layer: LayerShape, where: str) -> None:
    check_not_latent(layer, where)
    if layer.cache == "source":
        raise InputError(f"{where}: the blocks of an encoder-decoder cannot be joined.")
    if layer.norm == "affine":
        raise InputError(f"{where}: norms of queries and keys that have biases cannot be joined.")
    if layer.rest_matmul != (layer.mlp.channels * layer.mlp.matmul if layer.mlp else 0):
        raise InputError(f"{where}: the block holds weights that are neither attention nor an MLP headwise can join.")


def _around(layer: LayerShape) -> int:
    """Parameters of a block that are neither attention nor MLP: of a norm that feeds both."""
    mlp = layer.mlp
    return layer.rest_parameters - (0 if mlp is None else mlp.channels * mlp.parameters + mlp.own)


def _joined_mlp(mlps: Sequence[MlpShape], where: str) -> MlpShape | None:
    if not mlps:
        return None
    _require_alike([replace(mlp, channels=0) for mlp in mlps], "have the same kind of MLP", where)
    return replace(mlps[0], channels=sum(mlp.channels for mlp in mlps))


def _joined_cache(
    layers: Sequence[LayerShape | None], changes: Sequence[Sequence[Change]], where: str
) -> Packed | None:
    """What the rounded cache of all heads takes; None where it is not rounded."""
    pairs = zip(layers, changes, strict=True)
    attending = [(layer, own) for layer, own in pairs if layer is not None and layer.heads]
    if all(layer.packed is None for layer, _ in attending):
        return None
    digits = [code_digits(layer, own) for layer, own in attending]
    rounded = [each for each in digits if each is not None and any(each[0])]
    if len(rounded) < len(attending) or any(layer.packed and layer.packed.rebuilding for layer, _ in attending):
        raise InputError(f"{where}: of blocks that are joined all have a rounded cache or none, and no latents.")
    _require_alike([len(row) for _, values in rounded for row in values], "round values in rows of one length", where)
    keys, values = joined_digits(rounded)
    return packed_of(bits_of("".join((*keys, *values))))


def _require_alike(values: Sequence[Any], what: str, where: str) -> None:
    if any(value != values[0] for value in values):
        listed = ", ".join(dict.fromkeys(map(str, values)))
        raise InputError(f"{where}: blocks that are joined must {what}, found {listed}.")
