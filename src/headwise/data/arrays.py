"""Inputs other than text as checked tensors: arrays of a .npz file, pictures of a folder."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.data.processors import open_image_processor
from headwise.files.errors import InputError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MOST_PIXELS = 100_000_000  # of one picture: a small file may claim any number of them
NUMBERS = "fiub"  # kinds of NumPy that are plain numbers


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a .npz file: single-precision or whole numbers, all finite, each a row of something."""
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise InputError(f"There is no file or folder {path}.") from None
    except InputError:
        raise
    except Exception as error:  # zip files and NumPy's own headers are foreign input
        raise InputError(f"{path} is not a .npz file of plain arrays: {_reason(error)}") from error
    return {name: as_tensor(array, f"{path}: {name}") for name, array in loaded.items()}


def read_pictures(source: str, folder: Path, most: int, *, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """The first ``most`` pictures of ``folder`` as the model at ``source`` wants to see them."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)[:most]
    if not files:
        raise InputError(f"{folder} holds no pictures ({', '.join(PICTURES)}).")
    processor = open_image_processor(source, trust_remote_code=trust_remote_code)
    pixels = []
    for path in files:
        picture = _open_picture(path)
        try:
            pixels.append(processor(picture, return_tensors="pt")["pixel_values"].float())
        except Exception as error:  # a processor is what its config says, which is foreign
            raise InputError(f"The image processor of {source} cannot take {path}: {_reason(error)}") from error
        if pixels[-1].shape != pixels[0].shape or not pixels[-1].isfinite().all():
            raise InputError(f"The image processor of {source} makes no finite numbers of one size of {path}.")
    return {"pixel_values": torch.cat(pixels)}


def _open_picture(path: Path) -> Any:
    """A picture in red, green and blue."""
    try:
        from PIL import Image  # noqa: PLC0415 - only pictures need it
    except ImportError:
        raise InputError("Reading pictures needs pillow: pip install pillow.") from None
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")  # of large pictures and odd metadata
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise InputError(
                    f"{path} has {width:,} x {height:,} pixels; up to {MOST_PIXELS:,} are read: make it smaller."
                )
            return image.convert("RGB")
    except InputError:
        raise
    except Exception as error:  # decoders raise anything over a damaged picture
        raise InputError(f"{path} cannot be read as a picture: {_reason(error)}") from error


def _check_size(path: Path) -> None:
    """Raise where the arrays of a zip file, which may be packed, would not fit into memory."""
    with zipfile.ZipFile(path) as file:
        size = sum(info.file_size for info in file.infolist())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise InputError(f"{path} holds {size / 1e9:,.0f} GB of arrays, and this machine has {memory / 1e9:,.0f} GB.")


def as_tensor(array: np.ndarray, where: str) -> Tensor:
    """Single-precision or whole numbers, all finite, out of an array of any numbers."""
    if array.dtype.kind not in NUMBERS or not array.ndim:
        what = "a single value" if not array.ndim else f"an array of {array.dtype}"
        raise InputError(f"{where}: expected an array of numbers, found {what}.")
    floats = array.dtype.kind == "f"
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.ascontiguousarray(array, np.float32 if floats else np.int64))
    if floats and not tensor.isfinite().all():
        raise InputError(f"{where}: some numbers are NaN or infinite in single precision.")
    return tensor


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
