"""One finished point of a grid, as `check` and `draw` see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Point(NamedTuple, Generic[S]):
    """Settings and the values measured with them."""

    settings: S
    outcome: Mapping[str, Any]
