"""Models to be put side by side: what is known of them before they run, and whether they can do what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.checkpoints.load import model_class, open_config, open_shape
from headwise.checkpoints.loaded import Loaded
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records.settings import EvaluateConfig, OpenConfig
from headwise.records.shape import ModelShape

CONTEXT, FEWEST_WINDOWS = 4096, 4
SPEED_AT, SKILLS_AT = (1024,), (256, 1024)
SHORTEST = 16
SHORTEST_HAYSTACK = 128


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be measured, by name: in memory, or a folder or Hub id that is opened when its turn comes."""

    name: str
    given: Any
    tokenizer: Any = None

    def load(self, opening: OpenConfig | None) -> Loaded:
        """The model, opened if need be."""
        return Loaded.of(self.given, self.tokenizer, opening)

    @property
    def source(self) -> str | None:
        """Where it is opened from; None where it is in memory."""
        return str(self.given) if isinstance(self.given, str | Path) else None

    def shape(self) -> ModelShape:
        """Its shape; of one that is not open yet from its config alone."""
        return shape_of(Loaded.of(self.given).model) if self.source is None else open_shape(self.source)

    def kind(self) -> type[PreTrainedModel]:
        """Its class."""
        if self.source is None:
            return type(Loaded.of(self.given).model)
        return model_class(open_config(self.source), self.source)


def candidates_of(models: Mapping[str, Any], tokenizer: Any) -> list[Candidate]:
    """Models by name, each with its own tokenizer, ``(model, tokenizer)``, or with the one for all."""
    if not isinstance(models, Mapping):
        raise InputError('Give models by name, as in {"dense": model, "half": small}.')
    pairs = {name: given if isinstance(given, tuple) else (given, tokenizer) for name, given in models.items()}
    return [Candidate(name, model, own) for name, (model, own) in pairs.items()]


def where_to_run(first: Candidate) -> OpenConfig:
    """Where all models run if nobody says: where the first one is, or on a GPU if there is one and it is not open."""
    return OpenConfig() if first.source is not None else OpenConfig(device=str(Loaded.of(first.given).model.device))


def window_of(candidates: Sequence[Candidate], shapes: Sequence[ModelShape], config: EvaluateConfig) -> int:
    """The longest window that all models take, at least four of them in the text; or what is asked for, checked."""
    tokens, context = config.tokens, config.context
    if tokens < SHORTEST:
        raise InputError(f"{tokens:,} tokens are too few to measure on; the least is {SHORTEST}.")
    if context is None:
        return min(CONTEXT, max(SHORTEST, tokens // FEWEST_WINDOWS), *(shape.max_tokens for shape in shapes))
    if context < SHORTEST:
        raise InputError(f"A context of {context} tokens is too short to measure; the shortest is {SHORTEST}.")
    _check_length(candidates, shapes, context)
    if tokens < context:
        raise InputError(f"{tokens:,} tokens are asked for, less than one window of {context:,}.")
    return context


def lengths_of(
    candidates: Sequence[Candidate],
    shapes: Sequence[ModelShape],
    wished: tuple[int, ...] | None,
    usual: tuple[int, ...],
    least: int,
) -> tuple[int, ...]:
    """The lengths that are asked for, checked; or the usual ones that all models read, or as far as they go."""
    if wished is None:
        longest = min(shape.max_tokens for shape in shapes)
        return tuple(length for length in usual if length <= longest) or (longest,)
    for length in wished:
        if length < least:
            raise InputError(f"A length of {length} tokens is too short to measure at; the shortest is {least}.")
        _check_length(candidates, shapes, length)
    return tuple(sorted(set(wished)))


def _check_length(candidates: Sequence[Candidate], shapes: Sequence[ModelShape], length: int) -> None:
    for candidate, shape in zip(candidates, shapes, strict=True):
        if length > shape.max_tokens:
            raise InputError(
                f"A length of {length:,} is asked for, but {candidate.name} was made for {shape.max_tokens:,} tokens."
            )
