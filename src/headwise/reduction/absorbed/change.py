"""In a plan: the RoPE pairs a block of key/value heads still caches, those without a position, and its latent."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, Pairs, check_not_latent
from headwise.records.shape import AbsorbedShape, LayerShape


@dataclass(frozen=True, slots=True)
class Absorbed(Change):
    """Each ``joined`` neighbouring key/value heads cache RoPE pairs mixed across them, and one latent of ``rank``.

    ``rope_pairs`` lists the frequencies of the pairs of each block in ascending order; each may come up to ``joined``
    times. The pairs in ``free`` lose their position and join the latent, with the keys that RoPE does not turn and with
    the values. All others are cut.
    """

    kind: ClassVar[str] = "absorbed"
    order: ClassVar[int] = 45
    joined: int
    rank: int
    rope_pairs: Pairs
    free: tuple[int, ...] = ()

    @classmethod
    def whole(cls, layer: LayerShape, joined: int) -> Absorbed:
        """The change that leaves out nothing."""
        pairs = tuple(pair for pair in range(layer.rotary // 2) for _ in range(joined))
        rank = joined * (layer.qk_dim - layer.rotary + layer.v_dim)
        return cls(joined, rank, (pairs,) * (layer.kv_heads // joined))

    @property
    def turned(self) -> tuple[int, ...]:
        """The frequencies that any block keeps."""
        return tuple(sorted({pair for row in self.rope_pairs for pair in row}))

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with keys of what is left, and such a cache."""
        turned, free = 2 * len(self.turned), 2 * len(self.free) + layer.qk_dim - layer.rotary
        absorbed = AbsorbedShape(self.joined, len(self.rope_pairs[0]), self.rank)
        biases = layer.biases if absorbed.pairs else layer.biases.replace("k", "")  # latents have those of values
        return replace(layer, qk_dim=turned + free, rotary=turned, biases=biases, absorbed=absorbed)

    def describe(self, layer: LayerShape) -> str:
        """What a block caches."""
        free = f", {len(self.free)} without position" if self.free else ""
        return (
            f"{layer.kv_heads // self.joined} x {len(self.rope_pairs[0])} RoPE pairs{free}, latent of {self.rank} for "
            f"{self.joined} kv heads"
        )

    @classmethod
    def read(cls, row: Reader) -> Absorbed:
        """Such a cache out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        pairs = tuple(inner.integers() for inner in row.rows("rope_pairs"))
        return cls(row.integer("joined"), row.integer("rank"), pairs, row.child("free").integers())

    def kept_pairs(self) -> Pairs | None:
        """The RoPE pairs that are named."""
        return self.rope_pairs

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise an `InputError` where the cache of ``layer`` cannot be such a one."""
        check_not_latent(layer, where)
        if layer.cache != "tokens" or not layer.heads:
            raise InputError(f"{where}: only decoders that cache the keys and values of every token can be absorbed.")
        if layer.norm != "none":
            raise InputError(
                f"{where}: keys behind a norm cannot be absorbed, as each head is divided by a size of its own."
            )
        if self.joined < 1 or layer.kv_heads % self.joined:
            raise InputError(f"{where}: {layer.kv_heads} key/value heads make no blocks of {self.joined}.")
        blocks, half = layer.kv_heads // self.joined, layer.rotary // 2
        if len(self.rope_pairs) != blocks or len({len(row) for row in self.rope_pairs}) != 1:
            raise InputError(f"{where}: rope_pairs must hold {blocks} lists of one length, one per block of heads.")
        for row in self.rope_pairs:
            if list(row) != sorted(row) or any(not 0 <= p < half or row.count(p) > self.joined for p in row):
                raise InputError(
                    f"{where}: rope_pairs must be ascending numbers from 0 and below {half}, each at most "
                    f"{self.joined} times."
                )
        if list(self.free) != sorted(set(self.free)) or any(not 0 <= pair < half for pair in self.free):
            raise InputError(f"{where}: free must be ascending numbers from 0 and below {half}.")
        if both := set(self.free) & set(self.turned):
            raise InputError(f"{where}: pair {min(both)} cannot both keep and lose its position.")
        if not self.turned and not self.free and layer.qk_dim == layer.rotary:
            raise InputError(f"{where}: nothing of the keys is left; remove the attention instead.")
        most = self.joined * (2 * len(self.free) + layer.qk_dim - layer.rotary + layer.v_dim)
        if not 1 <= self.rank <= most:
            raise InputError(f"{where}: rank is {self.rank}; the latent of such a block has from 1 to {most}.")
