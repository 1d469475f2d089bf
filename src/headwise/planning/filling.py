"""Bits for coordinates that a cache rounds: where the next bit saves most, it goes first (reverse water-filling)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from headwise.records.packing import NOISE, bits_of, digits_of

# An error that shrinks a coordinate for all tokens alike adds up over them, noise does not: of the power e that
# rounding loses, e^2 is shrinkage, and costs so much more.
SHRINKAGE = 4.0
COST = {bits: noise + (SHRINKAGE - 1) * noise**2 for bits, noise in NOISE.items()}
STEPS = 96  # fillings of a layer: enough for a smooth curve


def fillings(losses: Sequence[float], widths: Sequence[int]) -> Iterator[tuple[list[int], float]]:
    """Bits of all coordinates and the loss they cost, from all at the most bits down to hardly any.

    ``losses`` are what losing each coordinate would cost, ``widths`` the bits that one may get.
    """
    steps = [(low, high, (COST[low] - COST[high]) / (high - low)) for low, high in pairwise(widths)]
    moves = sorted((loss * rate, place, low, high) for place, loss in enumerate(losses) for low, high, rate in steps)
    bits = [widths[-1]] * len(losses)
    spent = sum(loss * COST[widths[-1]] for loss in losses)
    stride = max(1, len(moves) // STEPS)
    for count, (_, place, low, high) in enumerate(moves):
        if not count % stride:
            yield bits.copy(), spent
        bits[place] = low
        spent += losses[place] * (COST[low] - COST[high])


def rounding_loss(losses: Sequence[Sequence[float]], digits: Sequence[str]) -> float:
    """What it costs to round coordinates, in rows, to as many bits as the ``digits`` of each row say."""
    rows = zip(losses, digits, strict=True)
    return sum(loss * COST[bits] for row, digits in rows for loss, bits in zip(row, bits_of(digits), strict=True))


def digit_rows(bits: Sequence[int], width: int) -> tuple[str, ...]:
    """``bits`` as digits, in rows of ``width`` coordinates."""
    digits = digits_of(bits)
    return tuple(digits[start : start + width] for start in range(0, len(digits), width))
