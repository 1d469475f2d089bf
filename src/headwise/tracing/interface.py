"""Another attention function for a while, through transformers' interface for that: no code of a model is touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NUMBERS = itertools.count()


@contextmanager
def attending(
    model: PreTrainedModel, attend: Callable[..., Any], mask: Callable[..., Any]
) -> Generator[None, None, None]:
    """In the block every attention of ``model`` is ``attend``, with masks as ``mask`` makes them.

    ``attend`` must take keys and values of any widths. Several models, or one several times, may be changed at once.
    """
    before = model.config._attn_implementation or "sdpa"
    name = f"headwise_{next(NUMBERS)}"
    attend.any_width = True  # pyrefly: ignore[missing-attribute]
    AttentionInterface.register(name, attend)
    # Without a mask function of its own, masks silently become None.
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]
