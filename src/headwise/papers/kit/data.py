"""Data that is there without a network: headwise's own texts, Python's manual, scikit-learn's handwritten digits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headwise.data.texts import own_texts
from headwise.files.errors import InputError

SYMBOLS = 128
FIFTH = 5
RARE = 20  # a word that occurs so often counts half
DIGIT_SIDE = 8
DIGITS_TRAIN = 1400


@dataclass(frozen=True, slots=True)
class Split:
    """Something to train on and something to validate on."""

    train: Tensor
    validation: Tensor


@dataclass(frozen=True, slots=True)
class Labelled:
    """Inputs with labels, the first ``train`` of them to train on."""

    inputs: Tensor
    labels: Tensor
    train: int


@cache
def characters() -> Split:
    """headwise's own texts, speeches and a novel, as ASCII codes: 293 kB to train on, 115 kB for validation."""
    return Split(*(_codes(own_texts(evaluation=held)[0].passages[0]) for held in (False, True)))


@cache
def topics() -> dict[str, str]:
    """The chapters of Python's language reference as ``help()`` shows them, the longest first."""
    from pydoc_data.topics import topics as chapters_by_name  # noqa: PLC0415 - large

    texts = {name: re.sub(r"\s+", " ", text) for name, text in chapters_by_name.items()}
    return dict(sorted(texts.items(), key=lambda item: -len(item[1])))


def chapters(labels: int, length: int, per_label: int) -> Labelled:
    """Pieces of ``length`` characters out of the longest chapters of Python's manual, and which they are from.

    Every fifth piece is held out.
    """
    pieces, names = [], []
    for label, text in enumerate(list(topics().values())[:labels]):
        codes = _codes(text)
        pieces.append(codes[: len(codes) // length * length].view(-1, length)[:per_label])
        names.append(torch.full((len(pieces[-1]),), label))
    inputs, labels_N = torch.cat(pieces), torch.cat(names)
    held = torch.arange(len(labels_N)) % FIFTH == FIFTH - 1
    order = torch.cat([torch.nonzero(~held)[:, 0], torch.nonzero(held)[:, 0]])
    return Labelled(inputs[order], labels_N[order], int((~held).sum()))


@cache
def passages(words: int, width: int) -> Tensor:
    """Consecutive pieces of ``words`` words of all texts, each as the mean of fixed random vectors of its words.

    Frequent words count less; (pieces, width).
    """
    texts = [*(own_texts(evaluation=held)[0].passages[0] for held in (False, True)), *topics().values()]
    tokens = [re.findall(r"[a-z]+", text.lower()) for text in texts]
    counts = Counter(word for text in tokens for word in text)
    index = {word: place for place, word in enumerate(sorted(counts))}
    vectors = torch.randn(len(index), width, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1 / (1 + counts[word] / RARE) for word in sorted(counts)])
    pieces = [
        [index[word] for word in text[start : start + words]]
        for text in tokens
        for start in range(0, len(text) - words, words)
    ]
    chosen = torch.tensor(pieces)
    summed = (vectors[chosen] * weights[chosen][..., None]).sum(1)
    return summed / summed.norm(dim=-1, keepdim=True) * width**0.5


def windows(codes: Tensor, length: int, count: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Batches of ``count`` windows of ``codes`` and the characters that follow each of theirs."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(codes) - length, (count, 1), generator=generator)
        taken = codes[starts + torch.arange(length + 1)]
        return taken[:, :-1], taken[:, 1:]

    return draw


@cache
def digits() -> Labelled:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels between 0 and 1, always in the same order."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra
    except ImportError:
        raise InputError('The digits come with scikit-learn: pip install "headwise[papers]".') from None
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, DIGIT_SIDE, DIGIT_SIDE) / 16
    labels = torch.tensor(targets)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return Labelled(images[order], labels[order], DIGITS_TRAIN)


def patches(images: Tensor, side: int) -> Tensor:
    """Square patches of images (B, S, S or B, S, S, colours), row by row: (B, patches, numbers)."""
    return images.unfold(1, side, side).unfold(2, side, side).flatten(1, 2).flatten(2)


def batches(data: Labelled, count: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Batches of ``count`` labelled training inputs."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(data.train, (count,), generator=generator)
        return data.inputs[chosen], data.labels[chosen]

    return draw


def _codes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
