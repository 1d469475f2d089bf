"""What a model is measured on: text cut into windows, pictures, or ready-made inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.arrays import read_arrays, read_pictures
from headwise.data.fitness import check_inputs, check_tokens
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
SPOKEN_TOKENS = 64  # that a speech model says itself where nobody gives it a transcript
MOST_INPUTS = 8  # times the tokens asked for, where a stack sees few tokens of each input


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
    asked, (lengths, said) = lengths, _lengths(lengths, window, longest, read[0].name)
    causal = all(site.cache == "tokens" for site in sites_of(model))
    main: list[Batch] = []
    held: list[Batch] = []
    for part in read:
        sizes = (window,) if causal or part.apart else lengths if asked else tuple(sorted({*lengths, window}))
        for size in sizes:
            wanted = max(1, round(tokens / len(read) / len(sizes) / size))
            beside = max(1, round(CHECKED * wanted))
            mine, others = hold_out(spread(part, size, (wanted + beside) * size), beside / (wanted + beside))
            main += _batches(model, mine, lengths, causal, part.kind)
            held += _batches(model, others, lengths, causal, part.kind)
    found = Calibration(tuple(main), ", ".join(part.name for part in read), [*notes, *said], tuple(held))
    if found.tokens < TOO_FEW * tokens:
        found.notes.append(f"{found.name} gives {found.tokens:,} tokens instead of {tokens:,}.")
    if not held:
        found.notes.append(f"{found.name} is too short to hold anything out: what is predicted is not checked.")
    return found


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


def file_calibration(
    model: PreTrainedModel, source: str, path: Path, tokens: int, *, trust_remote_code: bool = False
) -> Calibration:
    """Pictures of a folder, or the arrays of a .npz file, which carry the names of the model's inputs.

    As many are used as give the stack that sees the fewest tokens of an input ``tokens`` in all, within reason; every
    fifth of them is held out.
    """
    if path.is_dir():
        most = MOST_INPUTS * tokens
        arrays = read_pictures(source, path, most, trust_remote_code=trust_remote_code)
    else:
        arrays = read_arrays(path)
    name = model.main_input_name
    if name not in arrays:
        raise InputError(f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}; {source} needs an array {name!r}.")
    if not len(arrays[name]):
        raise InputError(f"{path} holds no {name}.")
    check_inputs(model, arrays, str(path))
    arrays = {key: array.to(model.dtype) if array.is_floating_point() else array for key, array in arrays.items()}
    one = _tokens_of(model, {key: array[:1] for key, array in arrays.items()})
    fewest = min(one, _spoken(model, arrays)) if model.config.is_encoder_decoder else one
    wanted = min(-(-tokens // fewest), MOST_INPUTS * -(-tokens // one))
    used = min(len(arrays[name]), max(1, round((1 + CHECKED) * wanted)))
    every = round(1 + 1 / CHECKED)
    held = [number for number in range(used) if number % every == every - 1] or ([used - 1] if used > 1 else [])
    main = [number for number in range(used) if number not in set(held)]
    found = Calibration(
        tuple(_input_batches(model, arrays, main, one, path)),
        str(path),
        held_out=tuple(_input_batches(model, arrays, held, one, path)),
    )
    if len(main) < wanted:
        found.notes.append(f"{path} gives {len(main) * fewest:,} tokens instead of {tokens:,}.")
    if not held:
        found.notes.append(f"{path} holds a single input: what is predicted is not checked.")
    return found


def _input_batches(
    model: PreTrainedModel, arrays: dict[str, Tensor], numbers: Sequence[int], one: int, path: Path
) -> Generator[Batch, None, None]:
    speaks = model.config.is_encoder_decoder and "decoder_input_ids" not in arrays  # one by one, of any length
    step = 1 if speaks else max(1, TOKENS_AT_ONCE // one)
    for some in torch.tensor(numbers, dtype=torch.long).split(step) if numbers else ():
        inputs = {key: array[some] for key, array in arrays.items()}
        if speaks:
            inputs["decoder_input_ids"] = _own_words(model, inputs[model.main_input_name], path)
        yield Batch(inputs, one * len(some), ())


def _spoken(model: PreTrainedModel, arrays: dict[str, Tensor]) -> int:
    """About how many tokens the decoder sees of one input."""
    ids = arrays.get("decoder_input_ids")
    return SPOKEN_TOKENS // 2 if ids is None else ids.shape[1]


def check_reads_text(model: PreTrainedModel, source: str) -> None:
    """Raise where a model does not read text."""
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


def _lengths(asked: tuple[int, ...] | None, window: int, longest: int, name: str) -> tuple[tuple[int, ...], list[str]]:
    """The lengths at which maps are looked at, as far as the windows go, and what is left out."""
    lengths = sorted(set(asked or DEFAULT_LENGTHS))
    if lengths[0] < SHORTEST:
        raise InputError(f"A length of {lengths[0]} is too short to measure; the shortest is {SHORTEST}.")
    if lengths[-1] > LONGEST:
        raise InputError(f"A length of {lengths[-1]:,} is asked for; attention maps are looked at up to {LONGEST:,}.")
    if asked and lengths[-1] > longest:
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


def _tokens_of(model: PreTrainedModel, one: dict[str, Tensor]) -> int:
    """Tokens the (first) attention stack makes of one input; raises where it makes none."""
    seen: list[int] = []
    block = sites_of(model)[0].block
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    inputs = dict(one)
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", torch.zeros(1, 1, dtype=torch.long))
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        raise InputError(f"The model does not take these inputs: {' '.join(str(error).split())[:200]}") from error
    finally:
        handle.remove()
    return seen[0]
