"""The packed KV cache of a model: how it is coded, from memory or from the folder the model was opened from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.load import open_config, open_model
from headwise.checkpoints.origin import origin_of
from headwise.files.errors import InputError
from headwise.runtime.cache import CODES, CacheSpec, PackedCache, read_spec

CASTS: set[tuple[str, str]] = set()  # fingerprints of models and of what they are in another precision, once checked


def codes_of(model: PreTrainedModel, folder: Path | str | None = None) -> CacheSpec | None:
    """How the cache of ``model`` is coded: as it was made, else as the ``folder`` it was opened from says."""
    origin = origin_of(model)
    if folder is None and origin is not None and origin.codes is not None:
        return origin.codes
    place = folder or model.name_or_path
    path = Path(place or "").expanduser() / CODES
    if not place or not path.is_file():
        return None
    try:
        codes = read_spec(path)
    except ValueError as error:
        raise InputError(str(error)) from None
    if codes.fingerprint != fingerprint(model) and not _is_cast(model, str(place), codes):
        raise InputError(f"{path} is of another model: its weights are not those that the cache was fitted to.")
    return codes


def _is_cast(model: PreTrainedModel, place: str, codes: CacheSpec) -> bool:
    """Whether ``model`` is what lies at ``place`` in another precision, and ``codes`` are of that."""
    pair = codes.fingerprint, fingerprint(model)
    if pair in CASTS:
        return True
    try:
        if open_config(place).dtype == model.dtype:
            return False
        stored = open_model(place)
    except InputError:
        return False
    if codes.fingerprint == fingerprint(stored) and fingerprint(cast(Any, stored).to(model.dtype)) == pair[1]:
        CASTS.add(pair)
    return pair in CASTS


def cache(model: PreTrainedModel, folder: Path | str | None = None, *, fused: bool = True) -> PackedCache:
    """An empty packed cache for ``model``, to be given to `generate` or to the model itself.

    It packs keys and values as `compress` found it best for this model: in memory, in the folder that the model was
    opened from, or in ``folder``. One cache is for one run of `generate`, or for one conversation. ``fused=False``
    unpacks everything at every step, for models whose attention cannot read packed numbers; it does not know of padding
    in front, so it is for sequences of one length. Latents (MLA) are always unpacked, and may be padded.

    >>> small = hw.compress(model, plan, profile)
    >>> cache = hw.cache(small)
    >>> inputs = tokenizer("the quick brown fox", return_tensors="pt")
    >>> tokens = small.generate(**inputs, past_key_values=cache, max_new_tokens=4)
    >>> cache.get_seq_length() == tokens.shape[1] - 1
    True
    """
    codes = codes_of(model, folder)
    if codes is None:
        place = folder or model.name_or_path or "memory"
        raise InputError(
            f"{type(model).__name__} comes from {place}, where there is no {CODES}: compress it with bits first, or "
            "give the folder that has one."
        )
    try:
        return PackedCache(model, codes, fused=fused)
    except ValueError as error:
        raise InputError(str(error)) from None
