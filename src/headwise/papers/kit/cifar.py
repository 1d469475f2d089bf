"""A part of CIFAR-10, fetched once: the one data set here that does not come with a package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from headwise.files.errors import InputError
from headwise.files.writing import cache_folder, replacing
from headwise.papers.kit.data import Labelled

NAME = "uoft-cs/cifar10"
TRAIN, TEST = 10_000, 2000
FILE = f"cifar10-{TRAIN}-{TEST}.npz"


@cache
def cifar10(train: int) -> Labelled:
    """The first images of its training part, ``train`` of them, and of its test part, 32 x 32 x 3 between -1 and 1."""
    path = cache_folder() / FILE
    if not path.is_file():
        _fetch(path)
    with np.load(path) as file:
        images, labels = (np.concatenate([file[name][:train], file[name][TRAIN:]]) for name in ("images", "labels"))
    return Labelled(torch.tensor(images).float() / 127.5 - 1, torch.tensor(labels).long(), train)


def _fetch(path: Path) -> None:
    try:
        from datasets import load_dataset  # noqa: PLC0415 - an extra
    except ImportError:
        raise InputError('CIFAR-10 is fetched with datasets: pip install "headwise[train]".') from None
    try:
        parts = [load_dataset(NAME, split=f"{split}[:{n}]") for split, n in (("train", TRAIN), ("test", TEST))]
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"CIFAR-10 is not at {path} and cannot be fetched: {str(error).splitlines()[0]} Go online once, or make "
            "that file with benchmarks/cifar10.py."
        ) from error
    images = [np.asarray(image) for part in parts for image in part["img"]]
    save_cifar10(path, np.stack(images), np.concatenate([part["label"] for part in parts]))


def save_cifar10(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Keep training images, then test images, as bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, images=images.astype(np.uint8), labels=labels.astype(np.uint8))
