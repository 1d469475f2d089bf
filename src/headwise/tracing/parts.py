"""Scores by part: by kind of text, and by position of the tokens in their window; with their errors over windows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal

from torch import Tensor

EDGES = (0, 64, 256, 512, 1024, 2048, 4096, 8192)
STRETCHES = {last: f"tokens {first + 1:,} to {last:,}" for first, last in pairwise(EDGES)}
Axis = Literal["kind", "position"]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens, one standard error of it (None of a single window), and how many tokens those are."""

    value: float
    error: float | None
    tokens: int

    @classmethod
    def of(cls, windows: list[tuple[float, int]]) -> Mean:
        """The mean of windows, each with its sum and its number of tokens.

        Tokens of one window are not independent, so the error is that of a ratio of sums over windows.
        """
        tokens = sum(count for _, count in windows)
        value = sum(total for total, _ in windows) / tokens
        if len(windows) == 1:
            return cls(value, None, tokens)
        squares = sum((total - value * count) ** 2 for total, count in windows)
        return cls(value, sqrt(squares * len(windows) / (len(windows) - 1)) / tokens, tokens)


class Parts:
    """Means of nats per token: of all tokens, of each kind of text, of each stretch of positions."""

    def __init__(self) -> None:
        self._windows: dict[tuple[Axis, str], list[tuple[float, int]]] = defaultdict(list)

    def add(self, kind: str, nats_BT: Tensor, counted_BT: Tensor | None = None) -> None:
        """Add a batch of windows of one ``kind``; only tokens that are ``counted`` count."""
        self._put(("kind", kind), nats_BT, counted_BT)
        for first, last in pairwise(EDGES):
            if first < nats_BT.shape[1]:
                stretch = slice(first, last)
                some = None if counted_BT is None else counted_BT[:, stretch]
                self._put(("position", STRETCHES[last]), nats_BT[:, stretch], some)

    def of(self, kind: str | None = None) -> Mean | None:
        """The mean of one kind, or of all, with its error; None where nothing was added."""
        chosen = [
            each
            for (axis, name), some in self._windows.items()
            if axis == "kind" and kind in (None, name)
            for each in some
        ]
        return Mean.of(chosen) if chosen else None

    def mean(self, kind: str | None = None) -> float | None:
        """The mean of one kind, or of all; None where nothing was added."""
        mean = self.of(kind)
        return None if mean is None else mean.value

    def by(self, axis: Axis) -> dict[str, Mean]:
        """The mean of each part on an axis that has more than one."""
        parts = {name: Mean.of(some) for (of, name), some in self._windows.items() if of == axis and some}
        return parts if len(parts) > 1 else {}

    def table(self) -> dict[str, tuple[float, int]]:
        """Mean and number of tokens of each part, on every axis that has more than one."""
        return {
            name: (mean.value, mean.tokens) for axis in ("kind", "position") for name, mean in self.by(axis).items()
        }

    def _put(self, key: tuple[Axis, str], nats_BT: Tensor, counted_BT: Tensor | None) -> None:
        if counted_BT is None:
            counts = [nats_BT.shape[1]] * len(nats_BT)
        else:
            nats_BT, counts = nats_BT * counted_BT, [int(count) for count in counted_BT.sum(1)]
        sums = nats_BT.double().sum(1).tolist()
        self._windows[key] += [(total, count) for total, count in zip(sums, counts, strict=True) if count]


def last_of(stretch: str) -> int:
    """The last position of a stretch, by its name."""
    return next(last for last, name in STRETCHES.items() if name == stretch)
