"""A tokenizer as the fields of a GGUF file: pieces, kinds, merges or scores, special tokens, chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from headwise.files.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTES = re.compile(r"<0x[0-9A-F]{2}>")
LAST = -1e6  # the score of pieces that no merge makes
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {WORDS % "{1,3}": "llama-bpe", WORDS % "": "qwen2"}  # what llama.cpp calls these ways to split text
KNOWN = "llama.cpp's names for the splits of GPT-2, SmolLM, Llama 3 and Qwen 2, and SentencePiece-like tokenizers"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What `tokenizer.ggml.*` says."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)  # bos, eos, unk, pad
    flags: dict[str, bool] = field(default_factory=dict)  # add_bos_token, add_eos_token, add_space_prefix
    template: str | None = None


def vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary of ``tokenizer`` for ``rows`` embeddings; raises where llama.cpp has no such tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{type(tokenizer).__name__} has no tokenizer.json; GGUF export reads the fast tokenizers.")
    described = json.loads(backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise InputError(f"GGUF export knows BPE tokenizers; this one is {model['type']}.")
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    pieces = _like_sentencepiece(described)
    tokens, types = _tokens(described, rows)
    first, last = _added(tokenizer)
    flags = {"add_bos_token": first, "add_eos_token": last}
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    rest: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "ids": {name: number for name, number in ids.items() if number is not None},
        "template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    }
    if pieces is None:
        return Vocabulary("gpt2", _split(described), merges=[" ".join(m) for m in merges], flags=flags, **rest)
    rank: dict[str, float] = {}
    for place, merge in enumerate(merges):
        rank.setdefault("".join(merge), -float(place))
    scores = [rank.get(token, LAST) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)]
    return Vocabulary("llama", "default", scores=scores, flags=flags | {"add_space_prefix": pieces}, **rest)


def _tokens(described: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{row}]" for row in range(rows)]
    types = [UNUSED] * rows
    for token, number in described["model"]["vocab"].items():
        if number < rows:
            tokens[number] = token
            types[number] = BYTE if described["model"]["byte_fallback"] and BYTES.fullmatch(token) else NORMAL
    for added in described["added_tokens"]:
        if added["id"] < rows:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
            if added["content"] == described["model"]["unk_token"] and described["model"]["byte_fallback"]:
                types[added["id"]] = UNKNOWN
    return tokens, types


def _like_sentencepiece(described: dict[str, Any]) -> bool | None:
    """Whether a space is put before the text, of tokenizers with bytes as a last resort; None of others."""
    if not described["model"]["byte_fallback"]:
        return None
    if any(part["type"] == "Prepend" for part in _parts(described["normalizer"], "normalizers")):
        return True
    before = _parts(described["pre_tokenizer"], "pretokenizers")
    return any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in before)


def _split(described: dict[str, Any]) -> str:
    """What llama.cpp calls the way in which text is split before merges."""
    parts = _parts(described["pre_tokenizer"], "pretokenizers")
    if parts and parts[-1]["type"] == "ByteLevel" and not parts[-1]["add_prefix_space"]:
        *before, last = parts
        kinds = [part["type"] for part in before]
        if last["use_regex"] and not before:
            return "gpt-2"
        if last["use_regex"] and kinds == ["Digits"] and before[0]["individual_digits"]:
            return "smollm"
        if not last["use_regex"] and kinds == ["Split"] and before[0]["pattern"].get("Regex") in SPLITS:
            return SPLITS[before[0]["pattern"]["Regex"]]
    raise InputError(f"GGUF export does not know how this tokenizer splits text; it knows {KNOWN}.")


def _parts(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if described is None:
        return []
    return described[key] if described["type"] == "Sequence" else [described]


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer puts its first and its last token around a text."""
    ids = tokenizer("a").input_ids
    return ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id
