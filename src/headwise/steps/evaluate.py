"""From models to scores: how good, how large and how fast they are, side by side, all against the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from headwise.checkpoints.load import model_class, open_config, open_model, open_shape
from headwise.checkpoints.save import DTYPES
from headwise.data.calibration import Calibration, check_reads_text, evaluation_windows, file_calibration
from headwise.data.processors import open_tokenizer
from headwise.data.texts import Text, read_texts
from headwise.data.windows import has_chat, tokenise
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_file
from headwise.linalg.divergence import perplexity
from headwise.records.scores import ModelScores, Scores, Speed
from headwise.records.settings import TextFormat
from headwise.records.shape import ModelShape
from headwise.tracing.example import example_inputs
from headwise.tracing.labelled import accuracy, check_classifies
from headwise.tracing.scoring import predicts_next, quality
from headwise.tracing.speed import ROUNDS, STEPS, cache_per_token, decoder_speed, encoder_speed

CONTEXT, FEWEST_WINDOWS = 4096, 4
SPEED_AT = (1024,)
SHORTEST = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that runs, in the precision it runs in."""

    source: str
    model: PreTrainedModel
    shape: ModelShape
    calibration: Calibration | None

    @property
    def kind(self) -> tuple[str, bool]:
        """What must agree for two models to be put side by side: what they read, and whether they write."""
        return self.model.main_input_name, predicts_next(self.model)


class _Reading:
    """Text that all models are measured on: read once, by the tokenizer of the first model."""

    def __init__(
        self, names: Sequence[str], form: TextFormat, accept: bool, tokens: int, context: int, shorter: bool
    ) -> None:
        self.names, self.form, self.accept, self.tokens = names, form, accept, tokens
        self.context, self._shorter = context, shorter
        self._texts: tuple[Text, ...] = ()

    def windows(self, model: PreTrainedModel, shape: ModelShape, source: str, trusted: bool) -> Calibration:
        """The windows of one model; where nobody asked for a context and the text is short, they are shorter."""
        check_reads_text(model, source)
        tokenizer = open_tokenizer(source, trust_remote_code=trusted)
        if not self._texts:
            chat = has_chat(tokenizer) and predicts_next(model)
            self._texts = read_texts(self.names, self.form, evaluation=True, chat=chat)
            if self._shorter:
                read = [tokenise(tokenizer, text, self.tokens, source) for text in self._texts]
                longest = [part.count + part.around for part in read if not part.apart]
                self.context = max(SHORTEST, min(self.context, *longest)) if longest else self.context
        return evaluation_windows(
            model, shape, source, tokenizer, self._texts, self.tokens, self.context, accept=self.accept
        )


def evaluate(
    sources: Sequence[str],
    *,
    texts: Iterable[str] = (),
    inputs: Path | None = None,
    labels: Path | None = None,
    tokens: int = 20480,
    context: int | None = None,
    text_format: TextFormat = "auto",
    accept_text: bool = False,
    speed_at: tuple[int, ...] | None = None,
    speed: bool = True,
    output: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Scores:
    """Measure the models at ``sources`` side by side, and write the scores to ``output`` if it is given.

    ``texts`` are files ("-": standard input; none: the text that comes with headwise, and its dialogues for models that
    chat), cut into windows of ``context`` tokens (what the models were made for, up to 4,096, and at least four
    windows); ``inputs`` a folder of pictures or a .npz file for models that do not read text; ``labels`` a file of
    ``label<TAB>text`` lines for models that classify text.
    Speed is measured at the lengths ``speed_at`` (1024, or as far as the models go). Only for that are all
    models held in memory at once; otherwise the first and one other.
    """
    texts = list(texts)
    _check(sources, texts, inputs, output)
    shapes = [open_shape(source) for source in sources]
    if labels is not None:
        for source in sources:
            check_classifies(model_class(open_config(source), source), source)
    _check_context(sources, shapes, context, tokens)
    lengths = _lengths(sources, shapes, speed_at)
    window = context or min(CONTEXT, max(SHORTEST, tokens // FEWEST_WINDOWS), *(shape.max_tokens for shape in shapes))
    text = _Reading(texts, text_format, accept_text, tokens, window, context is None) if inputs is None else None
    held: list[Opened] = []
    models: list[ModelScores] = []
    notes: list[str] = []
    for source in sources:
        model = open_model(source)
        shown = _facts(source, model)
        opened = _ready(source, model, held, text, inputs, tokens, trust_remote_code)
        if labels is not None:
            shown = replace(shown, accuracy=accuracy(model, source, labels, trust_remote_code=trust_remote_code))
        found, said = _quality(opened, held, progress)
        models.append(replace(shown, **found))
        notes += [note for note in said if note not in notes]
        if speed or not held:
            held.append(opened)
    if speed:
        speeds, said = _speeds(held, lengths, progress)
        models = [replace(scores, speed=tuple(own)) for scores, own in zip(models, speeds, strict=True)]
        notes += said
    first = held[0]
    scores = Scores(
        models=tuple(models),
        text=_text(first.calibration, text),
        settings=_settings(first.model),
        versions={name: metadata.version(name) for name in ("headwise", "torch", "transformers")},
        notes=tuple(notes),
    )
    if output is not None:
        scores.save(output)
    return scores


def _check(sources: Sequence[str], texts: list[str], inputs: Path | None, output: Path | None) -> None:
    if not sources:
        raise InputError("Give at least one model.")
    if texts and inputs is not None:
        raise InputError("Give text or inputs, not both.")
    if output is not None:
        check_file(output)


def _check_context(sources: Sequence[str], shapes: list[ModelShape], asked: int | None, tokens: int) -> None:
    if tokens < SHORTEST:
        raise InputError(f"{tokens:,} tokens are too few to measure on; the least is {SHORTEST}.")
    if asked is None:
        return
    if asked < SHORTEST:
        raise InputError(f"A context of {asked} tokens is too short to measure; the shortest is {SHORTEST}.")
    _check_length(sources, shapes, asked)
    if tokens < asked:
        raise InputError(f"{tokens:,} tokens are asked for, less than one window of {asked:,}.")


def _lengths(sources: Sequence[str], shapes: list[ModelShape], asked: tuple[int, ...] | None) -> tuple[int, ...]:
    if asked is None:
        longest = min(shape.max_tokens for shape in shapes)
        return tuple(length for length in SPEED_AT if length <= longest) or (longest,)
    for length in asked:
        if length < SHORTEST:
            raise InputError(f"A length of {length} tokens is too short to time; the shortest is {SHORTEST}.")
        _check_length(sources, shapes, length)
    return tuple(sorted(set(asked)))


def _check_length(sources: Sequence[str], shapes: list[ModelShape], length: int) -> None:
    for source, shape in zip(sources, shapes, strict=True):
        if length > shape.max_tokens:
            raise InputError(
                f"A length of {length:,} is asked for, but {source} was made for {shape.max_tokens:,} tokens."
            )


def _facts(source: str, model: PreTrainedModel) -> ModelScores:
    """What is read off a model in its own precision."""
    shape = shape_of(model)
    return ModelScores(
        source=source,
        kind=type(model).__name__,
        dtype=DTYPES[model.dtype],
        parameters=shape.total_parameters(),
        attention_parameters=shape.attention_parameters(),
        cache_bytes_per_token=cache_per_token(model) if predicts_next(model) else None,
    )


def _ready(
    source: str,
    model: PreTrainedModel,
    held: list[Opened],
    text: _Reading | None,
    inputs: Path | None,
    tokens: int,
    trusted: bool,
) -> Opened:
    """The model on the machine it runs on, with what it is measured on."""
    if torch.cuda.is_available():
        cast(Any, model).to("cuda")
    else:
        model.float()  # half precision is slow on a CPU
    shape = shape_of(model)
    opened = Opened(source, model, shape, None)
    if held and held[0].kind != opened.kind:
        raise InputError(f"{source} is not of the same kind as {held[0].source}: {_kinds(opened, held[0])}.")
    if inputs is not None:
        calibration = held[0].calibration if held else _all_inputs(model, source, inputs, tokens, trusted)
    elif text is not None and not model.config.is_encoder_decoder:
        calibration = text.windows(model, shape, source, trusted)
    else:
        calibration = None
    return replace(opened, calibration=calibration)


def _kinds(one: Opened, other: Opened) -> str:
    if one.model.main_input_name != other.model.main_input_name:
        return f"one reads {one.model.main_input_name}, the other {other.model.main_input_name}"
    return "only one of them writes text"


def _quality(opened: Opened, held: list[Opened], progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """The scores of a model on its inputs, compared with the first if it reads the same tokens."""
    calibration = opened.calibration
    if calibration is None:
        return {}, [f"{opened.source} is an encoder-decoder: give --inputs to compare what it says."]
    notes, first = list(calibration.notes), held[0] if held else None
    same = first is not None and first.calibration is not None and first.calibration.sha256 == calibration.sha256
    name = Path(opened.source).name
    measured = quality(
        opened.model,
        opened.source,
        calibration,
        first.model if first is not None and same else None,
        lambda done, total: progress(done, total, f"{name}: quality"),
    )
    if first is not None and measured.kl is None and measured.agreement is None:
        reason = (
            "its outputs have another size" if same else "its tokens are others, so perplexities do not compare either"
        )
        notes.append(f"{opened.source} is not compared with {first.source}: {reason}.")
    found = None if measured.loss is None else perplexity(measured.loss)
    return {**asdict(measured), "perplexity": found}, notes


def _speeds(held: list[Opened], lengths: tuple[int, ...], progress: Progress) -> tuple[list[list[Speed]], list[str]]:
    """Speeds of each model at each length."""
    models, first = [opened.model for opened in held], held[0]
    if first.model.config.is_encoder_decoder:
        return [[] for _ in held], ["The speed of encoder-decoders is not measured."]
    by_length: list[list[Speed]] = []
    if first.model.main_input_name != "input_ids":
        batch = cast(Calibration, first.calibration).batches[0]
        said = partial(_say, progress, first.shape.max_tokens)
        by_length.append(encoder_speed(models, [batch.inputs] * len(held), batch.tokens, first.shape.max_tokens, said))
    else:
        for length in lengths:
            said = partial(_say, progress, length)
            if predicts_next(first.model):
                by_length.append(decoder_speed(models, length, said))
            else:
                given = [{"input_ids": example_inputs(model, length)["input_ids"][:1]} for model in models]
                by_length.append(encoder_speed(models, given, length, length, said))
    return [list(own) for own in zip(*by_length, strict=True)], []


def _say(progress: Progress, length: int, number: int) -> None:
    progress(number, ROUNDS, f"speed at {length:,}")


def _text(calibration: Calibration | None, text: _Reading | None) -> dict[str, Any]:
    if calibration is None:
        return {}
    return {
        "name": calibration.name,
        "sha256": calibration.sha256,
        "tokens": calibration.tokens,
        **({} if text is None else {"context": text.context}),
    }


def _all_inputs(model: PreTrainedModel, source: str, inputs: Path, tokens: int, trusted: bool) -> Calibration:
    found = file_calibration(model, source, inputs, tokens, trust_remote_code=trusted)
    return replace(found, batches=(*found.batches, *found.held_out), held_out=())


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "precision": DTYPES[model.dtype],
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
        "decode_steps": STEPS,
    }
