"""Tokenizers and image processors of models.

They are opened here and nowhere else: some bring code of their own, which runs only if the caller trusts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import AutoImageProcessor, AutoTokenizer

from headwise.data.foreign import find_file
from headwise.files.errors import InputError
from headwise.files.reading import read_json

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
TOKENIZER = ("tokenizer_config.json", ("AutoTokenizer",))
SPECIAL = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id")
IMAGES = ("preprocessor_config.json", ("AutoImageProcessor", "AutoFeatureExtractor"))


def open_tokenizer(source: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """The tokenizer of a model (folder, Hub id, or GGUF file in a folder), or an `InputError`."""
    folder = Path(source).expanduser()
    if gguf_file is None and folder.is_dir() and not any((folder / name).exists() for name in VOCABULARIES):
        raise InputError(
            f"{source} has no tokenizer ({VOCABULARIES[0]} or the like): put the model's own there, or give "
            "inputs as arrays."
        )
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer = _open(AutoTokenizer, "tokenizer", *TOKENIZER, source, trust_remote_code, options)
    try:
        tokenizer.model_max_length = int(1e12)  # windows are cut here, so long texts are no reason to warn
        for name in SPECIAL:
            getattr(tokenizer, name)
    except Exception as error:  # as in `_open`: what its files say is foreign
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise InputError(f"The tokenizer of {source} does not know its own special tokens: {reason}") from error
    return tokenizer


def encode(tokenizer: Any, text: str | list[str], *, special: bool = False, longest: int | None = None) -> list[Any]:
    """The tokens of a text (of several), up to ``longest``, with or without the ``special`` ones around it."""
    try:
        cut = {} if longest is None else {"truncation": True, "max_length": longest}
        return tokenizer(text, add_special_tokens=special, **cut)["input_ids"]
    except Exception as error:  # a tokenizer is what its files say, which are foreign
        raise InputError(f"The tokenizer cannot read this text: {' '.join(str(error).split())[:200]}") from error


def open_image_processor(source: str, *, trust_remote_code: bool = False) -> Any:
    """The image processor of a model, or an `InputError`."""
    return _open(AutoImageProcessor, "image processor", *IMAGES, source, trust_remote_code, {})


def _open(
    auto_class: Any, what: str, file: str, keys: tuple[str, ...], source: str, trusted: bool, options: dict[str, Any]
) -> Any:
    code = None if trusted else _code(source, file, keys)
    if code is not None:
        raise InputError(
            f"The {what} of {source} would run code of its own, {code}: read it, and say `trust_remote_code` if you "
            "trust it."
        )
    try:
        return cast(
            Any, auto_class.from_pretrained(str(Path(source).expanduser()), **options, trust_remote_code=trusted)
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        if not trusted and "trust_remote_code" in str(error):
            reason = "it brings code of its own, which only runs with `trust_remote_code`."
        raise InputError(f"The {what} of {source} cannot be opened: {reason}") from error


def _code(source: str, file: str, keys: tuple[str, ...]) -> str | None:
    """What ``file`` of a model names as the code to open it with, as "file.py (class)"."""
    path = find_file(source, file)
    try:
        named = None if path is None else read_json(path).get("auto_map")
    except InputError:
        return None  # whoever opens it says what is wrong with it
    references = [named.get(key) for key in keys] if isinstance(named, dict) else [named]
    names = [name for each in references for name in (each if isinstance(each, list) else [each]) if name is not None]
    if not names:
        return None
    module, _, name = str(names[-1]).rpartition(".")
    return f"{module}.py ({name})"
