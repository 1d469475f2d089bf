"""What a model is measured on: text cut into windows, pictures, or ready-made inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.processors import open_image_processor, open_tokenizer
from headwise.families.sites import sites_of
from headwise.records.errors import InputError
from headwise.records.shape import ModelShape

DEFAULT_LENGTHS = (64, 128, 256, 512, 1024)
SHORTEST, LONGEST = 8, 4096  # a single map of the longest takes 64 MB, and a few of them are needed at once
CHARACTERS = 16  # of text for each token that is wanted; more of it is not read into tokens
TOKENS_AT_ONCE = 1024
SPOKEN_TOKENS = 64  # that a speech model says itself where nobody gives it a transcript
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward pass. ``main`` ones have the full length; others only show encoders at shorter ones."""

    inputs: dict[str, Tensor]
    tokens: int
    lengths: tuple[int, ...]
    main: bool = True


@dataclass(frozen=True, slots=True)
class Calibration:
    """Batches, what they were made of, and what a person should know about them."""

    batches: tuple[Batch, ...]
    name: str
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the main batches."""
        return sum(batch.tokens for batch in self.batches if batch.main)

    @property
    def sha256(self) -> str:
        """Hash of all inputs."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for name, tensor in sorted(batch.inputs.items()):
                digest.update(name.encode() + str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def text_calibration(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    text: str,
    name: str,
    tokens: int,
    lengths: tuple[int, ...] | None,
    *,
    trust_remote_code: bool = False,
) -> Calibration:
    """``tokens`` of ``text`` in windows of the longest length, spread evenly over it."""
    _check_reads_text(model, source)
    ids, before, after = _tokenize(source, _thinned(text, tokens), trust_remote_code)
    if not ids:
        raise InputError(f"{name} holds no text.")
    around = len(before) + len(after)
    lengths, notes = _lengths(lengths, shape.max_tokens, len(ids) + around, tokens, name)
    inside = lengths[-1] - around
    wanted = max(1, tokens // lengths[-1])
    count = min(wanted, max(1, len(ids) // inside))
    if count < wanted:
        notes.append(f"{name} has {len(ids):,} tokens; {count * lengths[-1]:,} are used instead of {tokens:,}.")
    starts = np.linspace(0, len(ids) - inside, count).round().astype(int)
    windows = [ids[start : start + inside] for start in starts]
    causal = all(site.cache == "tokens" for site in sites_of(model))
    plan = [(lengths[-1], lengths)] if causal else [(length, (length,)) for length in reversed(lengths)]
    batches = []
    for length, seen in plan:
        step = 1 if _one_by_one(model) else max(1, TOKENS_AT_ONCE // length)
        for start in range(0, count, step):
            group = windows[start : start + step]
            batch = torch.tensor([before + window[: length - around] + after for window in group])
            batches.append(Batch({"input_ids": batch}, batch.numel(), seen, main=length == lengths[-1]))
    return Calibration(tuple(batches), name, notes)


def other_windows(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    text: str,
    name: str,
    calibration_tokens: int,
    tokens: int,
    *,
    trust_remote_code: bool = False,
) -> Calibration:
    """``tokens`` of ``text`` from between the windows that `text_calibration` takes for ``calibration_tokens``."""
    ids, _, _ = _tokenize(source, _thinned(text, calibration_tokens), trust_remote_code)
    length = min(max(DEFAULT_LENGTHS), shape.max_tokens, len(ids))
    taken = np.linspace(0, len(ids) - length, max(2, calibration_tokens // length))
    between = ((taken[:-1] + taken[1:]) / 2).round().astype(int)
    chosen = between[np.linspace(0, len(between) - 1, max(1, min(len(between), tokens // length))).round().astype(int)]
    batches = tuple(Batch({"input_ids": torch.tensor([ids[i : i + length]])}, length, (length,)) for i in chosen)
    return Calibration(batches, name)


def window_calibration(
    model: PreTrainedModel,
    shape: ModelShape,
    source: str,
    text: str,
    name: str,
    tokens: int,
    context: int,
    *,
    trust_remote_code: bool = False,
) -> Calibration:
    """The first ``tokens`` of ``text`` in windows of ``context``, one after the other.

    Encoders get the special tokens of their tokenizer around every window, decoders only where the text begins.
    """
    _check_reads_text(model, source)
    ids, before, after = _tokenize(source, text[: CHARACTERS * tokens], trust_remote_code)
    causal = all(layer.cache == "tokens" for layer in shape.layers)
    if causal:
        ids, before, after = before + ids, [], []
    inside = context - len(before) - len(after)
    available = len(ids) // inside if inside > 0 else 0
    if not available:
        raise InputError(
            f"{name} has {len(ids):,} tokens, less than a window of {context:,} holds: give more text or a shorter "
            "context."
        )
    wanted = tokens // context
    count = min(wanted, available)
    notes = [] if count == wanted else [f"{name} gives {count * context:,} tokens instead of {wanted * context:,}."]
    windows = torch.tensor([before + ids[i * inside : (i + 1) * inside] + after for i in range(count)])
    step = 1 if _one_by_one(model) else max(1, TOKENS_AT_ONCE // context)
    batches = tuple(Batch({"input_ids": rows}, rows.numel(), (context,)) for rows in windows.split(step))
    return Calibration(batches, name, notes)


def file_calibration(
    model: PreTrainedModel, source: str, path: Path, tokens: int, *, trust_remote_code: bool = False
) -> Calibration:
    """Pictures of a folder, or the arrays of a .npz file, which carry the names of the model's inputs."""
    arrays = _pictures(source, path, tokens, trust_remote_code) if path.is_dir() else read_arrays(path)
    name = model.main_input_name
    if name not in arrays:
        raise InputError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; {source} needs an array {name!r}.")
    if not len(arrays[name]):
        raise InputError(f"{path} holds no {name}.")
    arrays = {key: array.to(model.dtype) if array.is_floating_point() else array for key, array in arrays.items()}
    one = _tokens_of(model, arrays[name][:1])
    used = min(len(arrays[name]), max(1, tokens // one))
    notes = [] if used * one >= tokens - one else [f"{path} gives {used * one:,} tokens instead of {tokens:,}."]
    step = 1 if model.config.is_encoder_decoder else max(1, TOKENS_AT_ONCE // one)
    batches = []
    for start in range(0, used, step):
        inputs = {key: array[start : min(start + step, used)] for key, array in arrays.items()}
        if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = _own_words(model, inputs[name], path)
        batches.append(Batch(inputs, one * len(inputs[name]), ()))
    return Calibration(tuple(batches), str(path), notes)


def _check_reads_text(model: PreTrainedModel, source: str) -> None:
    if model.main_input_name != "input_ids":
        kind = "pictures" if model.main_input_name == "pixel_values" else model.main_input_name
        raise InputError(f"{source} reads {kind}, not text: give --inputs with a folder of pictures or a .npz file.")


def _own_words(model: PreTrainedModel, sound: Tensor, path: Path) -> Tensor:
    """What a speech model says to ``sound``, from its start token on, where nobody gives it a transcript."""
    if not hasattr(model, "generate"):
        raise InputError(f"{path} holds no decoder_input_ids, and a model without a head cannot say them itself.")
    said = min(SPOKEN_TOKENS, cast(int, model.config.max_target_positions) - 2)
    ids = cast(Any, model).generate(sound, max_new_tokens=said, do_sample=False)
    start = model.config.decoder_start_token_id
    return ids if ids[0, 0] == start else torch.cat((torch.tensor([[start]]), ids), dim=1)


def _lengths(
    asked: tuple[int, ...] | None, longest: int, available: int, tokens: int, name: str
) -> tuple[tuple[int, ...], list[str]]:
    lengths = sorted(set(asked or DEFAULT_LENGTHS))
    if lengths[0] < SHORTEST:
        raise InputError(f"A length of {lengths[0]} is too short to measure; the shortest is {SHORTEST}.")
    if lengths[-1] > LONGEST:
        raise InputError(f"A length of {lengths[-1]:,} is asked for; attention maps are looked at up to {LONGEST:,}.")
    if asked and lengths[-1] > longest:
        raise InputError(f"A length of {lengths[-1]:,} is asked for, but the model was made for {longest:,} tokens.")
    fitting = [length for length in lengths if length <= min(longest, available, max(tokens, SHORTEST))]
    if available < SHORTEST:
        raise InputError(f"{name} has only {available} tokens; at least {SHORTEST} are needed.")
    if not fitting:
        fitting = [min(longest, available, max(tokens, SHORTEST))]
    notes = []
    dropped = [length for length in lengths if length > fitting[-1] and length <= longest]
    if dropped:
        shown = ", ".join(f"{length:,}" for length in dropped)
        reason = (
            f"{name} has only {available:,} tokens" if available < dropped[-1] else f"only {tokens:,} are asked for"
        )
        notes.append(f"Lengths of {shown} tokens are left out: {reason}.")
    return tuple(fitting), notes


def _thinned(text: str, tokens: int) -> str:
    """A text much longer than needed cut down to pieces from all over it."""
    wanted = CHARACTERS * tokens
    if len(text) <= 4 * wanted:
        return text
    starts = np.linspace(0, len(text) - wanted // 16, 16).astype(int)
    return "\n".join(text[start : start + wanted // 16] for start in starts)


def _one_by_one(model: PreTrainedModel) -> bool:
    """Decoders that classify sequences find the end of one by its padding, and some have none."""
    return type(model).__name__.endswith("ForSequenceClassification") and model.config.pad_token_id is None


def _tokenize(source: str, text: str, trusted: bool) -> tuple[list[int], list[int], list[int]]:
    """Tokens of ``text``, and the special tokens the model wants before and after a sequence."""
    tokenizer = open_tokenizer(source, trust_remote_code=trusted)
    plain = tokenizer("word", add_special_tokens=False)["input_ids"]
    full = tokenizer("word")["input_ids"]
    start = next((i for i in range(len(full)) if plain and full[i : i + len(plain)] == plain), None)
    tokenizer.model_max_length = int(1e12)  # windows are cut here, so long texts are no reason to warn
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (ids, [], []) if start is None else (ids, full[:start], full[start + len(plain) :])


def _pictures(source: str, folder: Path, most: int, trusted: bool) -> dict[str, Tensor]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)[:most]
    if not files:
        raise InputError(f"{folder} holds no pictures ({', '.join(PICTURES)}).")
    try:
        from PIL import Image  # noqa: PLC0415 - only pictures need it
    except ImportError:
        raise InputError("Reading pictures needs pillow: pip install pillow.") from None
    processor = open_image_processor(source, trust_remote_code=trusted)
    tensors = []
    for path in files:
        try:
            with Image.open(path) as image:
                tensors.append(processor(image.convert("RGB"), return_tensors="pt")["pixel_values"])
        except OSError as error:
            raise InputError(f"{path} cannot be read as a picture: {error}.") from error
    return {"pixel_values": torch.cat(tensors)}


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a .npz file: single-precision or whole numbers."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except FileNotFoundError:
        raise InputError(f"There is no file or folder {path}.") from None
    except Exception as error:
        raise InputError(f"{path} is not a .npz file of plain arrays: {error}") from error
    return {name: array.float() if array.is_floating_point() else array.long() for name, array in found.items()}


def _tokens_of(model: PreTrainedModel, one: Tensor) -> int:
    """Tokens the (first) attention stack makes of one input."""
    seen: list[int] = []
    block = sites_of(model)[0].block
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    inputs = {model.main_input_name: one}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        raise InputError(f"The model does not take these inputs: {' '.join(str(error).split())[:200]}") from error
    finally:
        handle.remove()
    return seen[0]
