"""A model folder written as one GGUF file for llama.cpp, and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints.gguf.blocks import blocks_of
from headwise.checkpoints.gguf.run import GgufModel
from headwise.checkpoints.gguf.tokens import vocabulary
from headwise.checkpoints.gguf.write import write_gguf
from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.data.texts import EVALUATION_TEXT
from headwise.families.shapes import shape_of
from headwise.files.errors import Failed
from headwise.files.writing import check_file
from headwise.linalg.divergence import divergences
from headwise.records.cost import cost_of
from headwise.records.settings import GgufPrecision

TOKENS = 256  # of prose on which the file must say what the model says
MOST = 2e-2  # nats: further off than this in half precision is a mistake, not rounding
BYTES = 2  # llama.cpp caches half precision unless told otherwise
QUANTISED = ("q8_0", "q4_0")


def export_gguf(source: str, path: Path, precision: GgufPrecision = "f16") -> dict[str, Any]:
    """Write the model at ``source`` to the GGUF file ``path``; what came out of it, with its distance from the model.

    That is the KL divergence of what llama.cpp's arithmetic makes of the file from what the model says.
    """
    check_file(path)
    model = open_model(source).float()
    tokenizer = open_tokenizer(source)
    blocks = blocks_of(model)
    words = vocabulary(tokenizer, model.config.vocab_size)
    write_gguf(blocks, words, path, Path(source).name, precision)
    ids = torch.tensor([tokenizer(EVALUATION_TEXT.read_text(encoding="utf-8")[: 16 * TOKENS]).input_ids[:TOKENS]])
    with torch.inference_mode():
        expected, written = model(ids).logits[0], GgufModel(path).logits(ids)[0]
    divergence = divergences(expected, written).mean().item()
    if divergence > MOST and precision not in QUANTISED:
        path.unlink()
        raise Failed(f"The file says something else than the model ({divergence:.2g} nats): a mistake in headwise.")
    shape = shape_of(model)
    unpacked = replace(shape, layers=tuple(replace(layer, packed=None) for layer in shape.layers))
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "architecture": blocks.architecture,
        "head_width": blocks.places.width,
        "kv_bytes_per_token": BYTES * blocks.cached_numbers,
        "model_kv_bytes_per_token": cost_of(unpacked, 1).kv_bytes_per_token,
        "packed": any(layer.packed is not None for layer in shape.layers),
        "divergence": divergence,
        "agreement": (expected.argmax(-1) == written.argmax(-1)).double().mean().item(),
    }
