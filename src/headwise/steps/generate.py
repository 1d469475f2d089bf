"""A model's own words."""

from __future__ import annotations

from typing import Any, cast

import torch

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer


def continue_text(source: str, prompt: str, tokens: int = 40) -> str:
    """``prompt`` and the model's most likely continuation."""
    model = cast(Any, open_model(source))
    tokenizer = open_tokenizer(source)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0], skip_special_tokens=True)
