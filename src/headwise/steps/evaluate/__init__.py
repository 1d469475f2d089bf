"""From models to scores: how good, how large and how fast they are, side by side, all against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headwise.checkpoints.loaded import Loaded
from headwise.checkpoints.packed import codes_of
from headwise.checkpoints.verify import DTYPES
from headwise.data.calibration import Calibration
from headwise.data.ready import are_batches
from headwise.data.texts import Files, own_texts
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_file
from headwise.records.scores import ModelScores, Scores
from headwise.records.settings import EvaluateConfig, OpenConfig, ReadConfig
from headwise.runtime.cache import CacheSpec
from headwise.steps.evaluate.candidates import (
    SHORTEST,
    SHORTEST_HAYSTACK,
    SKILLS_AT,
    SPEED_AT,
    Candidate,
    candidates_of,
    lengths_of,
    where_to_run,
    window_of,
)
from headwise.steps.evaluate.measures import Reading, Ready, all_inputs, check_alike, quality_of, speeds_of
from headwise.steps.evaluate.skills import Examination, check_writes
from headwise.steps.evaluate.tasks import read_tasks, task_scores
from headwise.tracing.labelled import Labels, accuracy, check_classifies
from headwise.tracing.placement import evaluating, place, running
from headwise.tracing.scoring import predicts_next
from headwise.tracing.speed import ROUNDS, STEPS, cache_per_token


def evaluate(
    models: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    text: Any = None,
    inputs: Any = None,
    labels: Labels | None = None,
    config: EvaluateConfig | None = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    progress: Progress = silent,
) -> Scores:
    """The scores of ``models`` side by side, all compared with the first: quality, size, cache and speed.

    ``models`` are models of transformers by name, each alone or with a tokenizer of its own, ``(model, tokenizer)``; or
    folders and Hub ids, whose tokenizers are found there. All come back as they were. ``text`` may be a string, a list
    of strings, a list of dialogues, a `datasets.Dataset` or a `pathlib.Path`; by default it is headwise's evaluation
    text. ``inputs`` are for models that do not read text (see `inspect`), ``labels`` for those that classify text:
    pairs of label and text, or a file of ``label<TAB>text`` lines.

    >>> config = hw.EvaluateConfig(tokens=256, speed=False)
    >>> scores = hw.evaluate({"dense": model, "same": model}, tokenizer, text=texts, config=config)
    >>> scores.models[1].kl
    0.0
    """
    return _evaluate(
        candidates_of(models, tokenizer),
        text,
        inputs,
        labels,
        config or EvaluateConfig(),
        reading or ReadConfig(),
        opening,
        progress,
    )


def evaluate_folders(
    sources: Sequence[str | Loaded],
    *,
    texts: Sequence[str] = (),
    inputs: Path | None = None,
    labels: Path | None = None,
    config: EvaluateConfig | None = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    output: Path | None = None,
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
    if output is not None:
        check_file(output)
    scores = _evaluate(
        [Candidate(source if isinstance(source, str) else source.name, source) for source in sources],
        Files(texts) if texts else None,
        inputs,
        labels,
        config or EvaluateConfig(),
        reading or ReadConfig(),
        opening or OpenConfig(),
        progress,
    )
    if output is not None:
        scores.save(output)
    return scores


def _evaluate(
    candidates: list[Candidate],
    text: Any,
    inputs: Any,
    labels: Labels | None,
    config: EvaluateConfig,
    reading: ReadConfig,
    opening: OpenConfig | None,
    progress: Progress,
) -> Scores:
    if not candidates:
        raise InputError("Give at least one model.")
    if text is not None and inputs is not None:
        raise InputError("Give text or inputs, not both.")
    if are_batches(text):
        text, inputs = None, text
    opening = opening or where_to_run(candidates[0])
    shapes = [candidate.shape() for candidate in candidates]
    for candidate in candidates if labels is not None else ():
        check_classifies(candidate.kind(), candidate.name)
    for candidate in candidates if config.skills or config.tasks is not None else ():
        check_writes(candidate)
    tasks = [] if config.tasks is None else read_tasks(config.tasks)
    window = window_of(candidates, shapes, config)
    lengths = lengths_of(candidates, shapes, config.speed_at, SPEED_AT, SHORTEST)
    haystacks = lengths_of(candidates, shapes, config.skills_at, SKILLS_AT, SHORTEST_HAYSTACK)
    longest = min(shape.max_tokens for shape in shapes)
    examination = Examination(haystacks, longest, config.seed) if config.skills else None
    words = Reading(text, reading, config.tokens, window, config.context is None) if inputs is None else None
    held: list[Ready] = []
    models: list[ModelScores] = []
    notes: list[str] = []
    with ExitStack() as until_the_end:
        for candidate in candidates:
            loaded = candidate.load(opening)
            with ExitStack() as its_turn:
                codes = codes_of(loaded.model)
                facts = _facts(candidate.name, loaded.model, codes)
                _placed(loaded, opening, its_turn)
                ready = replace(_ready(candidate.name, loaded, held, words, inputs, config.tokens), codes=codes)
                if labels is not None:
                    right = accuracy(ready.model, candidate.name, loaded.tokenizer(), labels)
                    facts = replace(facts, accuracy=right)
                measured, remarks = quality_of(ready, held, progress)
                if examination is not None:
                    prose = own_texts(evaluation=True)[0] if words is None else words.prose()
                    skills, more = examination.of(ready, loaded.tokenizer(), prose, progress)
                    facts, remarks = replace(facts, skills=skills), [*remarks, *more]
                if tasks:
                    given = task_scores(ready, loaded.tokenizer(), tasks, config.task_limit)
                    facts = replace(facts, tasks=given)
                models.append(replace(facts, **measured))
                notes += [note for note in remarks if note not in notes]
                if config.speed or not held:
                    held.append(ready)
                    until_the_end.push(its_turn.pop_all())
        if config.speed:
            speeds, remarks = speeds_of(held, lengths, progress)
            models = [replace(scores, speed=tuple(own)) for scores, own in zip(models, speeds, strict=True)]
            notes += remarks
        return Scores(
            models=tuple(models),
            text=_text(held[0].calibration, words),
            settings={**_settings(held[0].model), **_asked(config)},
            versions={name: metadata.version(name) for name in ("headwise", "torch", "transformers")},
            notes=tuple(notes),
        )


def _facts(name: str, model: PreTrainedModel, codes: CacheSpec | None) -> ModelScores:
    """What is read off a model in its own precision."""
    shape = shape_of(model)
    with evaluating(model):
        cached = cache_per_token(model, codes) if predicts_next(model) else None
    return ModelScores(
        source=name,
        kind=type(model).__name__,
        dtype=DTYPES[model.dtype],
        parameters=shape.total_parameters(),
        attention_parameters=shape.attention_parameters(),
        cache_bytes_per_token=cached,
    )


def _placed(loaded: Loaded, opening: OpenConfig | None, turn: ExitStack) -> None:
    """The model where it runs: for good if it was opened for this, else until its turn ends."""
    if loaded.own:
        place(loaded.model, opening)
    else:
        turn.enter_context(running(loaded.model, opening))


def _ready(name: str, loaded: Loaded, held: list[Ready], words: Reading | None, inputs: Any, tokens: int) -> Ready:
    """The model with what it is measured on."""
    model = loaded.model
    ready = Ready(name, model, shape_of(model), None)
    if held:
        check_alike(ready, held[0])
    if inputs is not None:
        calibration = held[0].calibration if held else all_inputs(loaded, inputs, tokens)
    elif words is not None and not model.config.is_encoder_decoder:
        calibration = words.windows(loaded, ready.shape)
    else:
        calibration = None
    return replace(ready, calibration=calibration)


def _text(calibration: Calibration | None, words: Reading | None) -> dict[str, Any]:
    if calibration is None:
        return {}
    return {
        "name": calibration.name,
        "sha256": calibration.sha256,
        "tokens": calibration.tokens,
        **({} if words is None else {"context": words.context}),
    }


def _asked(config: EvaluateConfig) -> dict[str, Any]:
    """Settings of what models are asked, where they are asked anything."""
    tasks = {} if config.tasks is None else {"tasks": config.tasks, "task_limit": config.task_limit}
    return {**({"seed": config.seed} if config.skills else {}), **tasks}


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "precision": DTYPES[model.dtype],
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
        "decode_steps": STEPS,
    }
