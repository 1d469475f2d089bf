"""Fingerprints: a hash of a model's weights, and one of the small files beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headwise.checkpoints.load import open_config
from headwise.files.contents import sha256_of

SAMPLES = 1024  # of a tensor: any training moves nearly all of its numbers
SMALL = (".json", ".txt", ".model", ".jinja", ".spm", ".bpe", ".tiktoken")  # configs, vocabularies, templates


def fingerprint(model: PreTrainedModel) -> str:
    """A hash over names, shapes and up to 1,024 evenly spread numbers of every tensor that is saved with ``model``.

    Tied tensors count once. Half precision is widened exactly, so a model and its float32 copy have the same one.
    """
    digest, seen = hashlib.sha256(), set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        step = -(-tensor.numel() // SAMPLES) | 1  # odd, so that it does not stay in a few columns
        some = tensor.detach().reshape(-1)[::step].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def files_fingerprint(source: str) -> str:
    """A hash over the contents of what lies beside the weights of ``source``: config, tokenizer, processor.

    Of a model on the Hub it is the revision.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return f"{source}@{getattr(open_config(source), '_commit_hash', None)}"
    files = sorted(path for path in folder.iterdir() if path.suffix in SMALL and path.is_file())
    listed = "".join(f"{path.name} {sha256_of(path)}\n" for path in files if not path.name.endswith(".index.json"))
    return hashlib.sha256(listed.encode()).hexdigest()


def located(source: str) -> str:
    """Where a model is, whatever folder a later command is started in: local folders absolute, Hub ids as they are."""
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.exists() else source
