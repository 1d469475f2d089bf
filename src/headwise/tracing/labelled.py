"""Accuracy of classifiers of text on a file of labelled examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.data.fitness import check_tokens
from headwise.data.processors import encode, open_tokenizer
from headwise.data.texts import read_text
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError

ENDING = "ForSequenceClassification"
DIGITS = 10  # more than the number of any label has


def check_classifies(kind: type[PreTrainedModel], source: str) -> None:
    """Raise where a model has no labels to be right about."""
    if not kind.__name__.endswith(ENDING):
        raise InputError(f"Labels are for models that classify text (...{ENDING}); {source} is a {kind.__name__}.")


def accuracy(model: PreTrainedModel, source: str, path: Path, *, trust_remote_code: bool = False) -> float:
    """Share of the examples in ``path`` whose label is the model's most likely one. One example is run at a time."""
    examples = read_examples(path, model.config, source)
    tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
    longest = shape_of(model).max_tokens
    right = 0
    for label, text in examples:
        ids = torch.tensor([encode(tokenizer, text, special=True, longest=longest)], device=model.device)
        if not ids.numel():
            raise InputError(f"{path} holds an example without a single token: {text!r}.")
        check_tokens(model, ids, f"The tokenizer of {source}")
        with torch.inference_mode():
            logits = cast(Any, model)(input_ids=ids).logits[0]
        if not logits.isfinite().all():
            raise InputError(f"{source} gives outputs that are not finite numbers.")
        right += int(logits.argmax().item() == label)
    return right / len(examples)


def read_examples(path: Path, config: PreTrainedConfig, source: str) -> list[tuple[int, str]]:
    """The examples of a file of ``label<TAB>text`` lines, labels as the numbers they have in ``config``."""
    names = cast(dict[str, int], config.label2id)
    examples = []
    for number, line in enumerate(read_text(str(path)).splitlines(), start=1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab:
            raise InputError(f"{path}, line {number}: expected a label, a tab and a text, found no tab.")
        index = names.get(label.strip(), int(label) if label.strip().isdecimal() and len(label) < DIGITS else -1)
        if index not in range(cast(int, config.num_labels)):
            raise InputError(
                f"{path}, line {number}: {source} knows no label {label!r}; it knows {', '.join(map(str, names))}."
            )
        examples.append((index, text))
    if not examples:
        raise InputError(f"{path} holds no examples.")
    return examples
