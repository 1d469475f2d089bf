"""Accuracy of classifiers of text on labelled examples."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.data.fitness import check_tokens
from headwise.data.processors import encode
from headwise.data.texts import read_text
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError

ENDING = "ForSequenceClassification"
DIGITS = 10  # more than the number of any label has

Labels = Path | Sequence[tuple[str | int, str]]


def check_classifies(kind: type[PreTrainedModel], source: str) -> None:
    """Raise where a model has no labels to be right about."""
    if not kind.__name__.endswith(ENDING):
        raise InputError(f"Labels are for models that classify text (...{ENDING}); {source} is a {kind.__name__}.")


def accuracy(model: PreTrainedModel, source: str, tokenizer: Any, labels: Labels) -> float:
    """Share of the labelled examples whose label is the model's most likely one. One example is run at a time."""
    examples = read_examples(labels, model.config, source)
    longest = shape_of(model).max_tokens
    right = 0
    for label, text in examples:
        ids = torch.tensor([encode(tokenizer, text, special=True, longest=longest)], device=model.device)
        if not ids.numel():
            raise InputError(f"{_called(labels)} holds an example without a single token: {text!r}.")
        check_tokens(model, ids, f"The tokenizer of {source}")
        with torch.inference_mode():
            logits = cast(Any, model)(input_ids=ids).logits[0]
        if not logits.isfinite().all():
            raise InputError(f"{source} gives outputs that are not finite numbers.")
        right += int(logits.argmax().item() == label)
    return right / len(examples)


def read_examples(labels: Labels, config: PreTrainedConfig, source: str) -> list[tuple[int, str]]:
    """Pairs of label and text, or a file of ``label<TAB>text`` lines; labels as the numbers they have in ``config``."""
    names = cast(dict[str, int], config.label2id)
    examples = []
    for label, text, where in _lines(labels) if isinstance(labels, Path) else _pairs(labels):
        index = names.get(label.strip(), int(label) if label.strip().isdecimal() and len(label) < DIGITS else -1)
        if index not in range(cast(int, config.num_labels)):
            raise InputError(f"{where}: {source} knows no label {label!r}; it knows {', '.join(map(str, names))}.")
        examples.append((index, text))
    if not examples:
        raise InputError(f"{_called(labels)} holds no examples.")
    return examples


def _lines(path: Path) -> Generator[tuple[str, str, str], None, None]:
    for number, line in enumerate(read_text(str(path)).splitlines(), start=1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab:
            raise InputError(f"{path}, line {number}: expected a label, a tab and a text, found no tab.")
        yield label, text, f"{path}, line {number}"


def _pairs(labels: Sequence[tuple[str | int, str]]) -> Generator[tuple[str, str, str], None, None]:
    for number, pair in enumerate(labels):
        if len(pair) != 2 or not isinstance(pair[1], str):  # noqa: PLR2004
            raise InputError(f"Row {number} of `labels`: expected a label and a text.")
        yield str(pair[0]), pair[1], f"Row {number} of `labels`"


def _called(labels: Labels) -> str:
    return str(labels) if isinstance(labels, Path) else "`labels`"
