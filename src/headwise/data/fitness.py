"""Checks before a model is run: plausible config, finite weights, inputs that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from headwise.families.shapes import rotary_width
from headwise.files.errors import InputError

MOST_LAYERS, MOST = 2000, 2**40  # of any number in a config
LONGEST = 200  # characters of a library's message
PAIRS = "rope_pairs"  # of a reduced layer
TOKEN = "_token_id"
TOKENS = ("input_ids", "decoder_input_ids")
MEASURED = ("pixel_values", "input_features")
MASKS = ("attention_mask", "decoder_attention_mask")
COUNTED = {
    "token_type_ids": "type_vocab_size",
    "position_ids": "max_position_embeddings",
}  # by what a config calls them


def check_numbers(content: Mapping[str, Any], where: str) -> None:
    """Raise where a config asks for more than any model has, which would take for ever, or names no token as one."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            check_numbers(value, where)
        most = MOST_LAYERS if "layer" in name else MOST
        if isinstance(value, int) and abs(value) > most:
            raise InputError(f"{where} gives {name} as {value:,}; a model is opened with up to {most:,}.")
        listed = value if isinstance(value, list) else [value]
        if name.endswith(TOKEN) and not all(isinstance(each, int | None) for each in listed):
            raise InputError(f"{where} gives {name} as {str(value)[:LONGEST]!r}; a token is a whole number.")


def check_finite(model: PreTrainedModel, source: str) -> None:
    """Raise where a weight is NaN or infinite, as everything measured on it would be, or names what is not there."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not _finite(weight.detach()):
            raise InputError(f"The weights {name} of {source} are not all finite numbers.")
    for name, pairs in model.named_buffers():
        if name.endswith(PAIRS) and not (pairs >= 0).logical_and(pairs < rotary_width(model) // 2).all():
            raise InputError(f"{name} of {source} names RoPE pairs that the model does not have.")


def check_settings(model: PreTrainedModel, source: str) -> None:
    """Raise where ``model`` has settings for generating that transformers opens but does not save again."""
    try:
        cast(Any, getattr(model, "generation_config", None) or GenerationConfig()).validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:LONGEST]
        raise InputError(f"{source} cannot be saved again, mend its generation_config.json: {reason}") from None


def check_tokens(model: PreTrainedModel, ids: Tensor, where: str) -> None:
    """Raise where ``ids`` are not all tokens that ``model`` has."""
    embedding = model.get_input_embeddings()
    if not ids.numel() or not isinstance(embedding, nn.Embedding):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= embedding.num_embeddings:
        wrong = low if low < 0 else high
        raise InputError(
            f"{where} gives the token {wrong}, and the model knows only 0 to {embedding.num_embeddings - 1}."
        )


def check_inputs(model: PreTrainedModel, inputs: Mapping[str, Tensor], where: str) -> None:
    """Raise where ``inputs`` are not what ``model`` reads: names, kinds of numbers, as many rows of each, tokens."""
    reads = signature(type(model).forward).parameters
    taken = [name for name in (*TOKENS, *MEASURED, *MASKS, *COUNTED) if name in reads]
    for name, tensor in inputs.items():
        if name not in taken:
            raise InputError(
                f"{where} holds {name!r}, which {type(model).__name__} does not read; it reads {', '.join(taken)}."
            )
        _check_input(model, name, tensor, f"{where}: {name}")
    if len({len(tensor) for tensor in inputs.values()}) > 1:
        rows = ", ".join(f"{len(tensor)} of {name}" for name, tensor in inputs.items())
        raise InputError(f"{where} holds different numbers of rows: {rows}.")


def _check_input(model: PreTrainedModel, name: str, tensor: Tensor, where: str) -> None:
    kind = "floating-point" if name in MEASURED else "whole"
    if not tensor.ndim or tensor.is_floating_point() != (name in MEASURED):
        raise InputError(f"{where}: expected an array of {kind} numbers.")
    if name in MEASURED and not _finite(tensor):
        raise InputError(f"{where}: some numbers are NaN or infinite.")
    if name in TOKENS:
        check_tokens(model, tensor, where)
    if name in MASKS and not (torch.equal(tensor, tensor.clamp(0, 1)) and tensor.flatten(1).any(1).all()):
        raise InputError(
            f"{where}: expected 1 for each token that counts and 0 for others, and one that counts in a row."
        )
    most = getattr(model.config, COUNTED.get(name, ""), None)
    if isinstance(most, int) and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < most:
        raise InputError(f"{where}: expected numbers from 0 to {most - 1}.")


def _finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; from the extremes, without a copy of the size of ``tensor``."""
    return bool(torch.stack(tensor.aminmax()).isfinite().all()) if tensor.numel() else True
