"""The packed cache of a model: how it is coded, from memory or from the folder the model was opened from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.origin import origin_of
from headwise.files.errors import InputError
from headwise.runtime.cache import CacheSpec, PackedCache, read_spec

CODES = "cache.safetensors"


def codes_of(model: PreTrainedModel, folder: Path | str | None = None) -> CacheSpec | None:
    """How the cache of ``model`` is coded: as it was made, else as the ``folder`` it was opened from says."""
    origin = origin_of(model)
    if folder is None and origin is not None and origin.codes is not None:
        return origin.codes
    path = Path(folder or model.name_or_path or "").expanduser() / CODES
    if not (folder or model.name_or_path) or not path.is_file():
        return None
    try:
        codes = read_spec(path)
    except ValueError as error:
        raise InputError(str(error)) from None
    if codes.fingerprint != fingerprint(model):
        raise InputError(f"{path} is of another model: its weights are not those that the cache was fitted to.")
    return codes


def packed_cache(model: PreTrainedModel, folder: Path | str | None = None) -> Any:
    """An empty cache that holds what ``model`` caches in as few bits as it was planned, to be given to ``generate``.

    ``model`` comes from `compress`, `heal` or `open`, or from transformers itself: then from the folder that its name
    says, or from ``folder``.

    >>> cache = hw.cache(packed)
    >>> tokens = packed.generate(**tokenizer("some text", return_tensors="pt"), past_key_values=cache, max_new_tokens=4)
    >>> cache.nbytes == hw.cost(packed, context=cache.get_seq_length(), dtype="fp32").cost.kv_bytes
    True
    """
    codes = codes_of(model, folder)
    if codes is None:
        raise InputError(
            f"There is no {CODES} beside this {type(model).__name__}: plan it with `cache` mixed, int8 or int4, compress "
            "it, or name the `folder` it is in."
        )
    try:
        return PackedCache(model, codes)
    except ValueError as error:
        raise InputError(str(error)) from None
