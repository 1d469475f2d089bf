"""The packed KV cache of a model in memory, by the codes that lie beside its weights."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from headwise.files.errors import InputError
from headwise.runtime.cache import CODES, PackedCache, codes_beside, read_spec


def cache(model: PreTrainedModel, folder: Path | str | None = None, *, fused: bool = True) -> PackedCache:
    """An empty packed cache for ``model``, to be given to `generate` or to the model itself.

    It packs keys and values by the codes (cache.safetensors) in the folder that the model was opened from, or in
    ``folder``. One cache is for one run of `generate`, or for one conversation. ``fused=False`` unpacks everything at
    every step, for models whose attention cannot read packed numbers.

    >>> cache = hw.cache(model, coded)
    >>> inputs = tokenizer("the quick brown fox", return_tensors="pt")
    >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
    >>> cache.get_seq_length() == tokens.shape[1] - 1
    True
    """
    place = folder or model.name_or_path or "memory"
    try:
        if folder is None:
            spec = codes_beside(model)
        else:
            path = Path(folder).expanduser() / CODES
            spec = read_spec(path) if path.is_file() else None
        if spec is not None:
            return PackedCache(model, spec, fused=fused)
    except ValueError as error:
        raise InputError(str(error)) from error
    raise InputError(
        f"{type(model).__name__} comes from {place}, where there is no {CODES}: "
        "compress it with bits first, or give the folder that has one."
    )
