"""What a model is measured on: batches, and text cut into windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.fitness import check_tokens
from headwise.data.texts import Text
from headwise.data.windows import CHARACTERS, SHORTEST, Tokens, Window, hold_out, in_order, spread, tokenise
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.records.shape import ModelShape

DEFAULT_LENGTHS = (64, 128, 256, 512, 1024)
LONGEST = 4096  # a single map of it takes 64 MB, and a few of them are needed at once
CONTEXT = 4096  # tokens of a window, where the model was made for so many
LOGITS = 1 << 28  # numbers (1 GB) that a window may have over the vocabulary
FEWEST = 2  # windows of each text
CHECKED = 0.25  # tokens to check predictions on, for each one that is measured on
TOO_FEW = 0.9  # of the tokens that were asked for: fewer are worth a note
TOKENS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass, without padding. ``lengths``: at which attention maps are looked at."""

    inputs: dict[str, Tensor]
    tokens: int
    lengths: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Batches, others of the same kind to check on, what they were made of, and what a person should know of them."""

    batches: tuple[Batch, ...]
    name: str
    notes: list[str] = field(default_factory=list)
    held_out: tuple[Batch, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens to measure on."""
        return sum(batch.tokens for batch in self.batches)

    @property
    def unseen(self) -> int:
        """Tokens to check on."""
        return sum(batch.tokens for batch in self.held_out)

    @property
    def sha256(self) -> str:
        """Hash of all inputs."""
        digest = hashlib.sha256()
        for batch in (*self.batches, *self.held_out):
            for name, tensor in sorted(batch.inputs.items()):
                digest.update(name.encode() + str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def text_calibration(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    tokenizer: Any,
    texts: Sequence[Text],
    tokens: int,
    *,
    context: int | None = None,
    lengths: tuple[int, ...] | None = None,
    accept: bool = False,
) -> Calibration:
    """``tokens`` of ``texts``, as many of each, in windows spread evenly over it, and others held out beside them.

    Windows are as long as the model is used: ``context`` tokens, by default what it was made for, up to 4,096. Maps are
    looked at up to the ``lengths``. An encoder takes texts of any length, so it is shown all of them.
    """
    check_reads_text(model, source)
    longest = _window(shape, context)
    read = [tokenise(tokenizer, text, 2 * tokens, source) for text in texts]
    notes = [note for part in read for note in part.warnings(accept=accept)]
    each = tokens // (FEWEST * len(read))  # tokens of a window, so that there are a few of each text
    window = min(longest, max(SHORTEST, each), *(_half(part) for part in read))
    wished, (lengths, left_out) = lengths, _lengths(lengths, window, longest, read[0].name)
    causal = all(site.cache == "tokens" for site in sites_of(model))
    main: list[Batch] = []
    held: list[Batch] = []
    for part in read:
        sizes = (window,) if causal or part.apart else lengths if wished else tuple(sorted({*lengths, window}))
        for size in sizes:
            wanted = max(1, round(tokens / len(read) / len(sizes) / size))
            beside = max(1, round(CHECKED * wanted))
            mine, others = hold_out(spread(part, size, (wanted + beside) * size), beside / (wanted + beside))
            main += _batches(model, mine, lengths, causal, part.kind)
            held += _batches(model, others, lengths, causal, part.kind)
    calibration = Calibration(tuple(main), ", ".join(part.name for part in read), [*notes, *left_out], tuple(held))
    if calibration.tokens < TOO_FEW * tokens:
        calibration.notes.append(f"{calibration.name} gives {calibration.tokens:,} tokens instead of {tokens:,}.")
    if not held:
        calibration.notes.append(
            f"{calibration.name} is too short to hold anything out: what is predicted is not checked."
        )
    return calibration


def evaluation_windows(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    tokenizer: Any,
    texts: Sequence[Text],
    tokens: int,
    context: int,
    *,
    accept: bool = False,
) -> Calibration:
    """The first ``tokens`` of each of ``texts`` in windows of ``context``, one after the other.

    Encoders get the special tokens of their tokenizer around every window, decoders only where the text begins.
    """
    check_reads_text(model, source)
    causal = all(layer.cache == "tokens" for layer in shape.layers)
    batches: list[Batch] = []
    notes: list[str] = []
    for text in texts:
        part = tokenise(tokenizer, replace(text, passages=_beginning(text, tokens)), tokens, source)
        notes += part.warnings(accept=accept)
        if causal and not part.apart:
            rows = [part.before + part.rows[0], *part.rows[1:]]
            part = replace(part, rows=rows, before=[], after=[])
        windows = in_order(part, context)
        if not windows:
            raise InputError(
                f"{part.name} has {part.count:,} tokens, less than a window of {context:,} holds: give more text or a "
                "shorter context."
            )
        chosen = _up_to(windows, tokens)
        given = sum(map(len, chosen))
        if given + context <= tokens:
            notes.append(f"{part.name} gives {given:,} tokens instead of {tokens:,}.")
        batches += _batches(model, chosen, (context,), causal, part.kind)
    return Calibration(tuple(batches), ", ".join(text.name for text in texts), notes)


def check_reads_text(model: PreTrainedModel, source: str) -> None:
    """Raise where a model does not read text."""
    if model.main_input_name != "input_ids":
        kind = "pictures" if model.main_input_name == "pixel_values" else model.main_input_name
        raise InputError(
            f"{source} reads {kind}, not text: give `inputs`, a folder of pictures, a .npz file or batches."
        )


def _window(shape: ModelShape, context: int | None) -> int:
    """The longest window to measure on: as asked for, else what the model was made for, in bounded memory."""
    if context is not None:
        if context < SHORTEST:
            raise InputError(f"A context of {context} tokens is too short to measure; the shortest is {SHORTEST}.")
        if context > shape.max_tokens:
            raise InputError(
                f"A context of {context:,} is asked for, but the model was made for {shape.max_tokens:,} tokens."
            )
        return context
    window = min(CONTEXT, shape.max_tokens)
    while window > DEFAULT_LENGTHS[-1] and window * (shape.outside_matmul // shape.width) > LOGITS:
        window //= 2
    return window


def _lengths(wished: tuple[int, ...] | None, window: int, longest: int, name: str) -> tuple[tuple[int, ...], list[str]]:
    """The lengths at which maps are looked at, as far as the windows go, and what is left out."""
    lengths = sorted(set(wished or DEFAULT_LENGTHS))
    if lengths[0] < SHORTEST:
        raise InputError(f"A length of {lengths[0]} is too short to measure; the shortest is {SHORTEST}.")
    if lengths[-1] > LONGEST:
        raise InputError(f"A length of {lengths[-1]:,} is asked for; attention maps are looked at up to {LONGEST:,}.")
    if wished and lengths[-1] > longest:
        raise InputError(
            f"A length of {lengths[-1]:,} is asked for, but the windows of this model have {longest:,} tokens."
        )
    fitting = tuple(length for length in lengths if length <= window) or (window,)
    dropped = [length for length in lengths if fitting[-1] < length <= longest]
    if not dropped:
        return fitting, []
    shown = ", ".join(f"{length:,}" for length in dropped)
    return fitting, [f"Lengths of {shown} tokens are left out: {name} and the tokens asked for allow {window:,}."]


def _half(part: Tokens) -> int:
    """The longest window of which a text holds two, one to measure on and one to check on; or all of a short one."""
    whole = (max(map(len, part.rows)) if part.apart else part.count) + part.around
    if whole < SHORTEST:
        raise InputError(f"{part.name} has only {whole} tokens; at least {SHORTEST} are needed.")
    inside = part.count // 2 + part.around
    return whole if part.apart or inside < SHORTEST else inside


def _batches(
    model: PreTrainedModel, windows: Sequence[Window], lengths: tuple[int, ...], causal: bool, kind: str
) -> list[Batch]:
    """Windows of one length together, as many at once as are worth it."""
    batches = []
    for size, group in groupby(sorted(windows, key=len, reverse=True), key=len):
        step = 1 if _one_by_one(model) else max(1, TOKENS_AT_ONCE // size)
        above = 1 << (size - 1).bit_length()  # its rows see more than half and at most so many keys
        seen = tuple(length for length in lengths if (length <= size if causal else length == size)) or (above,)
        for rows in torch.tensor(list(group)).split(step):
            check_tokens(model, rows, "The tokenizer")
            batches.append(Batch({"input_ids": rows}, rows.numel(), seen, kind))
    return batches


def _up_to(windows: Sequence[Window], tokens: int) -> list[Window]:
    """The first windows, up to so many tokens."""
    total, chosen = 0, []
    for window in windows:
        if chosen and total + len(window) > tokens:
            break
        chosen.append(window)
        total += len(window)
    return chosen


def _beginning(text: Text, tokens: int) -> tuple[str, ...]:
    """The passages of a text, of a long one as much as can be needed."""
    return text.passages if text.apart else tuple(passage[: CHARACTERS * tokens] for passage in text.passages)


def _one_by_one(model: PreTrainedModel) -> bool:
    """Decoders that classify sequences find the end of one by its padding, and some have none."""
    return type(model).__name__.endswith("ForSequenceClassification") and model.config.pad_token_id is None
