"""Scores by part: by kind of text, and by position of the tokens in their window."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

EDGES = (0, 512, 1024, 2048, 4096, 8192)


class Parts:
    """Running means of nats per token: of all tokens, of each kind of text, of each stretch of positions."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, kind: str, nats_BT: Tensor, counted_BT: Tensor | None = None) -> None:
        """Add a batch of one ``kind``; only tokens that are ``counted`` count."""
        self._put(("kind", kind), nats_BT, counted_BT)
        for first, last in pairwise(EDGES):
            if first < nats_BT.shape[1]:
                stretch = slice(first, last)
                some = None if counted_BT is None else counted_BT[:, stretch]
                self._put(("position", f"tokens {first + 1:,} to {last:,}"), nats_BT[:, stretch], some)

    def mean(self, kind: str | None = None) -> float | None:
        """The mean of one kind, or of all; None where nothing was added."""
        chosen = [sums for (axis, name), sums in self._sums.items() if axis == "kind" and kind in (None, name)]
        count = sum(count for _, count in chosen)
        return sum(total for total, _ in chosen) / count if count else None

    def table(self) -> dict[str, tuple[float, int]]:
        """Mean and number of tokens of each part, on every axis that has more than one."""
        rows = {}
        for axis in ("kind", "position"):
            parts = {name: sums for (of, name), sums in self._sums.items() if of == axis and sums[1]}
            if len(parts) > 1:
                rows |= {name: (total / count, count) for name, (total, count) in parts.items()}
        return rows

    def _put(self, key: tuple[str, str], nats_BT: Tensor, counted_BT: Tensor | None) -> None:
        total, count = self._sums.get(key, (0.0, 0))
        if counted_BT is not None:
            nats_BT = nats_BT * counted_BT
        more = nats_BT.numel() if counted_BT is None else int(counted_BT.sum())
        self._sums[key] = total + nats_BT.double().sum().item(), count + more
