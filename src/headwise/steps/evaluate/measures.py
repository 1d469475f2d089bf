"""What is measured of a model that runs: its quality on text or other inputs, against the first one, and its speed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from headwise.checkpoints.loaded import Loaded
from headwise.data.calibration import Calibration, check_reads_text, evaluation_windows
from headwise.data.ready import input_calibration
from headwise.data.texts import Text, own_texts, texts_of
from headwise.data.windows import has_chat, tokenise
from headwise.files.errors import InputError
from headwise.files.progress import Progress
from headwise.linalg.divergence import perplexity
from headwise.records.scores import Speed
from headwise.records.settings import ReadConfig
from headwise.records.shape import ModelShape
from headwise.runtime.cache import CacheSpec
from headwise.steps.evaluate.candidates import SHORTEST
from headwise.tracing.example import example_inputs
from headwise.tracing.rounding import rounding
from headwise.tracing.scoring import predicts_next, quality
from headwise.tracing.speed import ROUNDS, decoder_speed, encoder_speed


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that runs, in the precision it runs in, with what it is measured on, and how its cache is packed."""

    name: str
    model: PreTrainedModel
    shape: ModelShape
    calibration: Calibration | None
    codes: CacheSpec | None = None

    @property
    def kind(self) -> tuple[str, bool]:
        """What must agree for two models to be put side by side: what they read, and whether they write."""
        return self.model.main_input_name, predicts_next(self.model)


class Reading:
    """Text that all models are measured on: read once, by the tokenizer of the first model."""

    def __init__(self, text: Any, reading: ReadConfig, tokens: int, context: int, shorter: bool) -> None:
        self.text, self.reading, self.tokens = text, reading, tokens
        self.context, self._shorter = context, shorter
        self._texts: tuple[Text, ...] = ()

    def windows(self, loaded: Loaded, shape: ModelShape) -> Calibration:
        """The windows of one model; where nobody asked for a context and the text is short, they are shorter."""
        model, source = loaded.model, loaded.name
        check_reads_text(model, source)
        tokenizer = loaded.tokenizer()
        if not self._texts:
            chat = has_chat(tokenizer) and predicts_next(model)
            self._texts = texts_of(self.text, self.reading.text_format, evaluation=True, chat=chat)
            if self._shorter:
                read = [tokenise(tokenizer, text, self.tokens, source) for text in self._texts]
                longest = [part.count + part.around for part in read if not part.apart]
                self.context = max(SHORTEST, min(self.context, *longest)) if longest else self.context
        accept = self.reading.accept_text
        return evaluation_windows(
            model, shape, source, tokenizer, self._texts, self.tokens, self.context, accept=accept
        )

    def prose(self) -> Text:
        """The first prose of what is read, or headwise's own where it holds none."""
        return next((text for text in self._texts if text.passages), own_texts(evaluation=True)[0])


def all_inputs(loaded: Loaded, inputs: Any, tokens: int) -> Calibration:
    """Inputs that are no text, all of them to measure on."""
    trusted = loaded.trust_remote_code
    calibration = input_calibration(loaded.model, loaded.name, inputs, tokens, trust_remote_code=trusted)
    return replace(calibration, batches=(*calibration.batches, *calibration.held_out), held_out=())


def check_alike(one: Ready, first: Ready) -> None:
    """Raise where two models cannot be put side by side."""
    if one.kind == first.kind:
        return
    reads, other = one.model.main_input_name, first.model.main_input_name
    differs = "only one of them writes text" if reads == other else f"one reads {reads}, the other {other}"
    raise InputError(f"{one.name} is not of the same kind as {first.name}: {differs}.")


def quality_of(ready: Ready, held: list[Ready], progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """The scores of a model on its inputs, compared with the first if it reads the same tokens; and remarks."""
    calibration = ready.calibration
    if calibration is None:
        return {}, [f"{ready.name} is an encoder-decoder: give `inputs` to compare what it says."]
    notes, first = list(calibration.notes), held[0] if held else None
    same = first is not None and first.calibration is not None and first.calibration.sha256 == calibration.sha256
    name = Path(ready.name).name
    with ExitStack() as packed:
        for one in (ready, *held[:1]):
            packed.enter_context(rounding(one.model, one.codes))
        measured = quality(
            ready.model,
            ready.name,
            calibration,
            first.model if first is not None and same else None,
            lambda done, total: progress(done, total, f"{name}: quality"),
        )
    if first is not None and measured.kl is None and measured.agreement is None:
        reason = (
            "its outputs have another size" if same else "its tokens are others, so perplexities do not compare either"
        )
        notes.append(f"{ready.name} is not compared with {first.name}: {reason}.")
    scores = {each.name: getattr(measured, each.name) for each in fields(measured)}  # parts stay records
    return {**scores, "perplexity": None if measured.loss is None else perplexity(measured.loss)}, notes


def speeds_of(held: list[Ready], lengths: tuple[int, ...], progress: Progress) -> tuple[list[list[Speed]], list[str]]:
    """Speeds of each model at each length; and remarks."""
    models, first = [ready.model for ready in held], held[0]
    if first.model.config.is_encoder_decoder:
        return [[] for _ in held], ["The speed of encoder-decoders is not measured."]
    by_length: list[list[Speed]] = []
    if first.model.main_input_name != "input_ids":
        batch, longest = cast(Calibration, first.calibration).batches[0], first.shape.max_tokens
        watch = partial(_round, progress, longest)
        by_length.append(encoder_speed(models, [batch.inputs] * len(held), batch.tokens, longest, watch))
    else:
        for length in lengths:
            watch = partial(_round, progress, length)
            if predicts_next(first.model):
                by_length.append(decoder_speed(models, length, watch, [ready.codes for ready in held]))
            else:
                given = [{"input_ids": example_inputs(model, length)["input_ids"][:1]} for model in models]
                by_length.append(encoder_speed(models, given, length, length, watch))
    return [list(own) for own in zip(*by_length, strict=True)], []


def _round(progress: Progress, length: int, number: int) -> None:
    progress(number, ROUNDS, f"speed at {length:,}")
