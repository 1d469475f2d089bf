"""In a plan: how many key/value heads of a layer become one, and how wide that one is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.change import Change, Pairs, check_not_latent
from headwise.records.shape import LayerShape


@dataclass(frozen=True, slots=True)
class Sharing(Change):
    """Each ``joined`` neighbouring key/value heads of a layer become one of widths ``qk_dim`` and ``v_dim``.

    ``rope_pairs`` lists the RoPE pairs of each merged head, in ascending order; each may come up to ``joined`` times.
    Without it all pairs come equally often.
    """

    kind: ClassVar[str] = "sharing"
    order: ClassVar[int] = 30
    joined: int
    qk_dim: int
    v_dim: int
    rope_pairs: Pairs | None = None

    def shape(self, layer: LayerShape) -> LayerShape:
        """``layer`` with fewer key/value heads of these widths, for all its query heads."""
        return replace(
            layer,
            kv_heads=layer.kv_heads // self.joined,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            rotary=2 * len(self.pairs(layer)[0]),
        )

    def describe(self, layer: LayerShape) -> str:
        """How many heads become how many, and their widths."""
        widths = ", ".join(
            f"{name} {self.joined} x {old} > {new}"
            for name, old, new in (("qk dim", layer.qk_dim, self.qk_dim), ("v dim", layer.v_dim, self.v_dim))
        )
        return f"kv heads {layer.kv_heads} merged to {layer.kv_heads // self.joined}, {widths}"

    @classmethod
    def read(cls, row: Reader) -> Sharing:
        """Merged heads out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        pairs = row.rows("rope_pairs") if row.has("rope_pairs") else None
        return cls(
            *(row.integer(name) for name in ("joined", "qk_dim", "v_dim")),
            rope_pairs=None if pairs is None else tuple(inner.integers() for inner in pairs),
        )

    def kept_pairs(self) -> Pairs | None:
        """The RoPE pairs that are named."""
        return self.rope_pairs

    def pairs(self, layer: LayerShape) -> Pairs:
        """The RoPE pairs of each merged head: those named, else all of ``layer`` as often as there is room for."""
        if self.rope_pairs is not None:
            return self.rope_pairs
        often = self.qk_dim // layer.qk_dim if layer.rotary else 0
        pairs = tuple(pair for pair in range(layer.rotary // 2) for _ in range(often))
        return (pairs,) * (layer.kv_heads // self.joined)

    def check(self, layer: LayerShape, where: str) -> None:
        """Raise an `InputError` where the heads of ``layer`` cannot be merged so."""
        check_not_latent(layer, where)
        if layer.norm != "none":
            raise InputError(
                f"{where}: key/value heads behind norms on queries and keys cannot be merged, as each head is divided "
                "by a size of its own."
            )
        if self.joined < 1 or not layer.heads or layer.kv_heads % self.joined:
            raise InputError(f"{where}: {layer.kv_heads} key/value heads cannot be merged {self.joined} at a time.")
        for name in ("qk_dim", "v_dim"):
            wanted, most = getattr(self, name), self.joined * getattr(layer, name)
            if not 1 <= wanted <= most:
                raise InputError(f"{where}: {name} is {wanted}; {self.joined} merged heads have from 1 to {most}.")
        self._check_pairs(layer, where)

    def _check_pairs(self, layer: LayerShape, where: str) -> None:
        if self.rope_pairs is None:
            if layer.rotary and self.qk_dim % layer.qk_dim:
                raise InputError(
                    f"{where}: rope_pairs must be named where qk_dim is no multiple of {layer.qk_dim}, as "
                    f"{self.qk_dim} is none."
                )
            return
        half, free = layer.rotary // 2, self.joined * (layer.qk_dim - layer.rotary)
        if len(self.rope_pairs) != layer.kv_heads // self.joined or len({len(row) for row in self.rope_pairs}) != 1:
            raise InputError(
                f"{where}: rope_pairs must hold {layer.kv_heads // self.joined} lists of one length, one per merged "
                "head."
            )
        for row in self.rope_pairs:
            if list(row) != sorted(row) or any(not 0 <= pair < half or row.count(pair) > self.joined for pair in row):
                raise InputError(
                    f"{where}: rope_pairs must be ascending numbers between 0 and {half - 1}, each at most "
                    f"{self.joined} times."
                )
        if not 0 <= self.qk_dim - 2 * len(self.rope_pairs[0]) <= free:
            raise InputError(
                f"{where}: qk_dim {self.qk_dim} does not fit {len(self.rope_pairs[0])} RoPE pairs, which take two "
                f"dimensions each, and at most {free} free ones."
            )
