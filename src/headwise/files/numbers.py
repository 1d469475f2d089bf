"""One grammar for every number a person types: 75%, 0.75, 200k, 32k, 30M, 8GB."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from headwise.files.errors import InputError

NUMBER = re.compile(r"(\d+(?:[._]\d+)*|\.\d+)(e-?\d{1,2})? *([a-z%]*)", re.IGNORECASE)
DIGITS = 20  # no count, size or share needs more, and longer ones would take long to compute
THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
BINARY = {"": 1, "k": 2**10, "m": 2**20}
SIZES = {
    **{unit: factor for unit, factor in THOUSANDS.items() if unit != "b"},
    **{f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)},
}


def read_count(text: str | float) -> int:
    """A number of things: 200000, 200k, 30M, 2B."""
    return _whole(text, _units(text, THOUSANDS), "a number such as 200000, 200k or 30M")


def read_window(text: str | float) -> int:
    """Tokens in a window or a cache: 4096, or 32k, which is 32,768 as in the names of models."""
    return _whole(text, _units(text, BINARY), "a number of tokens such as 4096 or 32k")


def read_windows(text: str) -> tuple[int, ...]:
    """Several of them with commas in between: 64,512,4k."""
    return tuple(read_window(part.strip()) for part in str(text).split(","))


def read_size(text: str | float) -> int:
    """Bytes: 23040, 24kB, 8GB (10^9) or 8GiB (2^30)."""
    value = _value(text)
    unit = None if value is None else value[1].removesuffix("b")
    amount = value[0] * SIZES[unit] if value is not None and unit in SIZES else None
    return _whole(text, amount, "bytes such as 23040, 24kB or 8GB")


def read_share(text: str | float) -> float:
    """A share: 0.75 or 75%."""
    value = _value(text)
    if value is None or value[1] not in ("", "%"):
        raise InputError(f"Expected a share such as 0.75 or 75%, got {text!r}.")
    return float(value[0] / 100 if value[1] else value[0])


def read_decimals(text: str) -> tuple[float, ...]:
    """Numbers with commas in between: 1,0.5,0.25."""
    try:
        return tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise InputError(f"Expected numbers with commas between them, got {text!r}.") from None


def _value(text: str | float) -> tuple[Fraction, str] | None:
    """The number and the unit of ``text``, the latter in small letters; None where it is neither."""
    if isinstance(text, float) and not math.isfinite(text):
        return None
    match = NUMBER.fullmatch(str(text).strip())
    if match is None or len(match[1]) > DIGITS:
        return None
    try:
        return Fraction(match[1].replace("_", "") + (match[2] or "")), match[3].lower()
    except ValueError:
        return None


def _units(text: str | float, factors: dict[str, int]) -> Fraction | None:
    value = _value(text)
    return value[0] * factors[value[1]] if value is not None and value[1] in factors else None


def _whole(text: str | float, amount: Fraction | None, expected: str) -> int:
    if amount is None:
        raise InputError(f"Expected {expected}, got {text!r}.")
    return round(amount)
