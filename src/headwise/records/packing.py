"""What a packed KV cache takes: widths of coordinates in bits, fields in bytes, bytes of a whole cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from headwise.files.errors import InputError
from headwise.files.reading import Reader

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)  # bits of a coordinate that is rounded; two fields at most, so no 7
WHOLE_BITS = 16  # of a coordinate that is as good as not rounded: two fields of 8
FIELDS = (8, 4, 2, 1)
# Mean square error of a normal variable rounded to so many bits, over its variance (Lloyd and Max).
NOISE = {0: 1.0, 1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.00064, 8: 0.0000409, 16: 2e-7}
LEVEL_BYTES = 4  # of a coordinate: its width and three numbers that give its levels
RECENT = 16  # tokens that are packed together: as many as are left over stay whole
LOUD_BITS = 4  # of a token, for its keys and for its values: how far they are from their mean
LAYER_BYTES = 48  # in half precision, for keys and for values: a factor for each width up to 8, three of the loudness


@dataclass(frozen=True, slots=True)
class Packed:
    """The cache of a layer whose coordinates are rounded: bytes of a token, bytes of the levels, tokens kept whole.

    ``live`` counts the coordinates of a token that have any bits, ``rebuilding`` the multiplications that make its keys
    anew whenever they are read.
    """

    bytes_per_token: int
    level_bytes: int
    whole: int = 1
    live: int = 0
    rebuilding: int = 0

    @classmethod
    def read(cls, row: Reader) -> Packed:
        """These numbers out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        return cls(*(row.integer(item.name, least=0) for item in fields(cls)))


def bits_of(digits: str) -> list[int]:
    """The bits that digits in base 36 stand for: 0 to 8, and g for 16."""
    return [int(digit, 36) for digit in digits]


def digits_of(bits: Iterable[int]) -> str:
    """One digit for the bits of each coordinate."""
    return "".join("g" if each == WHOLE_BITS else str(each) for each in bits)


def check_digits(name: str, rows: Iterable[str], where: str) -> None:
    """Raise an `InputError` that begins with ``where`` if ``rows`` are not bits of coordinates."""
    allowed = digits_of((*WIDTHS, WHOLE_BITS))
    if not set("".join(rows)) <= set(allowed):
        raise InputError(f"{where}: {name} must be digits out of {allowed}.")


def packed_bytes(counts: Iterable[int]) -> int:
    """Bytes of one token with so many fields of 8, 4, 2 and 1 bits."""
    return sum(-(-count * field // 8) for count, field in zip(counts, FIELDS, strict=True))


def packed_of(widths: Iterable[int], loud: int = 2, whole: int = 1) -> Packed:
    """What the cache of a layer takes whose coordinates have these ``widths``, and tokens so many kinds of loudness."""
    counts, coordinates, live = [0] * len(FIELDS), 0, 0
    for bits in widths:
        coordinates += 1
        live += bits > 0
        for place, field in enumerate(FIELDS):
            counts[place] += 2 * (bits == WHOLE_BITS and place == 0) + bool(bits & field)
    counts[FIELDS.index(LOUD_BITS)] += loud
    return Packed(packed_bytes(counts), LEVEL_BYTES * coordinates + LAYER_BYTES, whole, live)
