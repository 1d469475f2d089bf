"""Text as a model learns from it: one long row of tokens in a memory-mapped file, cut into windows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.checkpoints.fingerprint import files_fingerprint
from headwise.data.processors import encode, open_tokenizer
from headwise.data.sources import Datum, Source, called, pieces_of, read_source
from headwise.data.vocabulary import learn_tokenizer
from headwise.files.contents import contents_of
from headwise.files.errors import InputError
from headwise.files.progress import Progress
from headwise.files.writing import replacing, write_text
from headwise.records.blueprint import Text
from headwise.records.settings import TrainConfig
from headwise.steps.train.examples import MOST_HELD_OUT, Examples, Rows

AT_ONCE = 16  # pieces of text that become tokens together, in parallel where the tokenizer can
SMALL = 2**16
CHECKED = 2**22  # tokens looked at together


def read_windows(
    reads: Text,
    data: Sequence[Datum],
    tokenizer: str | None,
    config: TrainConfig,
    folder: Path,
    progress: Progress,
    *,
    trust_remote_code: bool = False,
) -> Examples:
    """The text of ``data`` in windows of a context. Tokens are made once and lie in ``folder``.

    Without a ``tokenizer`` one is learnt from the text, without its end, which is measured on.
    """
    context = config.context or reads.context
    if context > reads.context:
        raise InputError(f"A context of {context:,} is asked for, but the plan's model has one of {reads.context:,}.")
    sources = [read_source(datum) for datum in data]
    name, contents = called(data), [source.sha256 for source in sources]
    words = _hash(contents, reads.vocab) if tokenizer is None else _hash(files_fingerprint(tokenizer))
    if tokenizer is None:
        learnt = folder / f"tokenizer-{words[:8]}"
        if not _as_made(learnt):
            progress(0, 1, "learning a vocabulary")
            shutil.rmtree(learnt, ignore_errors=True)
            learn_tokenizer(_beginning(sources), reads.vocab, learnt)
            _seal(learnt)
        tokenizer = str(learnt)
    opened = open_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    size = 1 + max(opened.get_vocab().values(), default=0)
    if size > reads.vocab:
        raise InputError(
            f"{tokenizer} has {size:,} tokens, the plan's model knows {reads.vocab:,}; "
            f"headwise design `vocab` {size} makes room for them."
        )
    kind = np.uint16 if reads.vocab <= SMALL else np.uint32
    sha256 = _hash(contents, words, np.dtype(kind).name)
    file = folder / f"tokens-{sha256[:8]}.bin"
    if not _as_made(file):
        _write_tokens(sources, opened, kind, file, progress)
        _seal(file)
    tokens = _open_tokens(file, kind, reads.vocab)
    rows = rows_of(tokens, context)
    examples = Examples.split(rows, (len(tokens) - 1) // context, context, config.held_out, name, sha256)
    return replace(examples, tokenizer=tokenizer)


def _open_tokens(file: Path, kind: type, vocab: int) -> np.ndarray:
    """The tokens in ``file``, or an `InputError` where they cannot be what `_write_tokens` wrote."""
    size, each = file.stat().st_size, np.dtype(kind).itemsize
    if not size or size % each:
        raise InputError(f"{file} is damaged: {size} bytes are no row of tokens. Remove it to have it made again.")
    tokens = np.memmap(file, kind, mode="r")
    if any(int(tokens[i : i + CHECKED].max()) >= vocab for i in range(0, len(tokens), CHECKED)):
        raise InputError(f"{file} is damaged: it holds tokens beyond {vocab - 1}. Remove it to have it made again.")
    return tokens


def rows_of(tokens: np.ndarray, context: int) -> Rows:
    """Windows by number: ``context`` tokens, and for each the one behind it."""

    def rows(numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        starts = (numbers * context).tolist()
        window_BT = torch.from_numpy(np.stack([tokens[i : i + context + 1] for i in starts]).astype(np.int64))
        return {"input_ids": window_BT[:, :-1]}, window_BT[:, 1:]

    return rows


def _beginning(sources: Sequence[Source]) -> Generator[str, None, None]:
    """The text without the part that is at most held out."""
    left = int((1 - MOST_HELD_OUT) * sum(source.characters for source in sources))
    for source in sources:
        for piece in pieces_of(source):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


def _write_tokens(sources: Sequence[Source], tokenizer: Any, kind: type, file: Path, progress: Progress) -> None:
    """All tokens one after the other, and an end of text behind every file if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    done, total = 0, sum(source.characters for source in sources)
    with replacing(file) as temporary, temporary.open("wb") as out:
        for source in sources:
            for pieces in _groups(source):
                for ids in encode(tokenizer, pieces):
                    out.write(np.array(ids, dtype=kind).tobytes())
                done += sum(map(len, pieces))
                progress(done, total, "reading text into tokens")
            out.write(np.array(end, dtype=kind).tobytes())


def _seal(place: Path) -> None:
    """Put down what a file or folder holds, beside it."""
    write_text(_sealed(place), json.dumps(contents_of(place)))


def _as_made(place: Path) -> bool:
    """Whether a file or folder is there and as `_seal` found it; otherwise it is made again."""
    sealed = _sealed(place)
    return place.exists() and sealed.is_file() and sealed.read_bytes() == json.dumps(contents_of(place)).encode()


def _sealed(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")


def _groups(source: Source) -> Generator[list[str], None, None]:
    group: list[str] = []
    for piece in pieces_of(source):
        group.append(piece)
        if len(group) == AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
