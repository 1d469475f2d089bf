"""In a plan: the query heads that a layer keeps; all key/value heads stay."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from headwise.files.errors import InputError
from headwise.records.change import Change, check_not_latent


@dataclass(frozen=True, slots=True)
class FewerQueries(Change):
    kind: ClassVar[str] = "fewer_queries"
    order: ClassVar[int] = 35
    kept: tuple[int, ...]

    def check(self, layer, where):
        check_not_latent(layer, where)
        shared = layer.heads // (layer.kv_heads or 1)
        if not all(low < high for low, high in pairwise((-1, *self.kept, layer.heads))):
            raise InputError(f"{where}: kept must be query heads in ascending order.")
        groups = [head // shared for head in self.kept]
        if {groups.count(group) for group in range(layer.kv_heads)} != {len(self.kept) // layer.kv_heads}:
            raise InputError(f"{where}: every key/value head must keep as many query heads.")

    def shape(self, layer):
        return replace(layer, heads=len(self.kept))

    def describe(self, layer):
        return f"{len(self.kept)} of {layer.heads} query heads"

    @classmethod
    def read(cls, row):
        row.only("kept")
        return cls(row.child("kept").integers(least=0))

    def entry(self):
        return {"kept": list(self.kept)}
