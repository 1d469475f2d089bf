"""What stands between raw data and a model: its tokenizer, its image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import AutoImageProcessor, AutoTokenizer

from headwise.records.errors import InputError


def open_tokenizer(source: str) -> Any:
    """The tokenizer of a model, or an `InputError`."""
    try:
        tokenizer = cast(Any, AutoTokenizer.from_pretrained(str(Path(source).expanduser())))
        tokenizer.model_max_length = int(1e12)  # windows are cut here, so long texts are no reason to warn
        return tokenizer
    except Exception as error:
        raise InputError(f"The tokenizer of {source} cannot be opened: {' '.join(str(error).split())[:200]}") from error


def encode(tokenizer: Any, text: str | list[str], *, special: bool = False, longest: int | None = None) -> list[Any]:
    """The tokens of a text (of several), up to ``longest``, with or without the ``special`` ones around it."""
    try:
        cut = {} if longest is None else {"truncation": True, "max_length": longest}
        return tokenizer(text, add_special_tokens=special, **cut)["input_ids"]
    except Exception as error:  # a tokenizer is what its files say, which are foreign
        raise InputError(f"The tokenizer cannot read this text: {' '.join(str(error).split())[:200]}") from error


def open_image_processor(source: str) -> Any:
    """The image processor of a model, or an `InputError`."""
    try:
        return cast(Any, AutoImageProcessor.from_pretrained(str(Path(source).expanduser())))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"The image processor of {source} cannot be opened: {reason}") from error
