"""Pictures with labels, as a classifier learns from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwise.data.arrays import read_arrays
from headwise.data.sources import Datum, called
from headwise.files.errors import InputError
from headwise.records.blueprint import Images
from headwise.records.settings import TrainConfig
from headwise.steps.train.examples import Examples

PIXELS, LABELS = "pixel_values", "labels"


def read_pictures(reads: Images, data: Sequence[Datum], config: TrainConfig) -> Examples:
    """Pictures and labels out of .npz files, mixed once: files may be sorted by label, and their end is held out."""
    files = [datum for datum in data if isinstance(datum, Path)]
    if len(files) < len(data):
        raise InputError("A vit reads images: give `data` as .npz files.")
    pairs = [_read(file.expanduser(), reads) for file in files]
    pixels_BCYX, labels_B = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    mixed = torch.randperm(len(labels_B), generator=torch.Generator().manual_seed(0))
    pixels_BCYX, labels_B = pixels_BCYX[mixed], labels_B[mixed]
    digest = hashlib.sha256(pixels_BCYX.numpy().tobytes() + labels_B.numpy().tobytes())
    return Examples.split(
        lambda numbers: ({PIXELS: pixels_BCYX[numbers]}, labels_B[numbers]),
        len(labels_B),
        reads.tokens,
        config.held_out,
        called(files),
        digest.hexdigest(),
    )


def _read(file: Path, reads: Images) -> tuple[Tensor, Tensor]:
    arrays = read_arrays(file)
    for name in (PIXELS, LABELS):
        if name not in arrays:
            raise InputError(f"{file} holds {', '.join(sorted(arrays)) or 'nothing'}; an array {name!r} is needed.")
    pixels_BCYX, labels_B = arrays[PIXELS], arrays[LABELS]
    one = (reads.channels, reads.size, reads.size)
    if pixels_BCYX.shape[1:] != one or not pixels_BCYX.is_floating_point():
        raise InputError(
            f"{file}: expected {PIXELS} as floating-point numbers of shape {('pictures', *one)}, found "
            f"{'' if pixels_BCYX.is_floating_point() else 'whole numbers of '}{tuple(pixels_BCYX.shape)}."
        )
    if labels_B.shape != pixels_BCYX.shape[:1] or labels_B.is_floating_point():
        raise InputError(f"{file}: expected one whole number in {LABELS} for each of {len(pixels_BCYX):,} pictures.")
    if len(labels_B) and not 0 <= int(labels_B.min()) <= int(labels_B.max()) < reads.labels:
        raise InputError(f"{file}: {LABELS} must lie between 0 and {reads.labels - 1}, as in the plan.")
    return pixels_BCYX, labels_B
