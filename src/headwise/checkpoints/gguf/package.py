"""The gguf package, which is an extra."""

from __future__ import annotations

from typing import Any

from headwise.files.errors import InputError


def library() -> Any:
    """The module ``gguf``; raises where it is not installed."""
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError:
        raise InputError('GGUF files need another package: pip install "headwise[gguf]".') from None
    return gguf
