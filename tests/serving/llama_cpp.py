"""The real llama.cpp, out of the wheel of xllamacpp, whose library exports its C functions.

Structures that come back by value are opaque here: they are larger than the real ones and handed on as they came.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor

MOST_BATCH = 512
ROOM = 65536  # bytes of a piece of text


class Opaque(ctypes.Structure):
    """Parameters, of which only the first few numbers of a context's are known here."""

    _fields_ = [("numbers", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
VALUES = ("llama_model_default_params", "llama_context_default_params")
POINTERS = ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab")


def library_file() -> Path | None:
    """The shared library, if it is installed."""
    spec = importlib.util.find_spec("xllamacpp")
    return next(Path(spec.origin).parent.glob("*.so"), None) if spec is not None and spec.origin else None


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, file: Path, context: int = MOST_BATCH) -> None:
        self._lib = ctypes.CDLL(str(library_file()))
        self.log = ""
        self._callback = LOG(self._keep)
        self._lib.llama_log_set(self._callback, None)
        for name in VALUES:
            getattr(self._lib, name).restype = Opaque
        for name in POINTERS:
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.llama_batch_init.restype = Batch
        self._lib.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        self._lib.llama_backend_init()
        model = self._lib.llama_model_load_from_file(str(file).encode(), self._lib.llama_model_default_params())
        if not model:
            raise RuntimeError(self.log)
        self._model = ctypes.c_void_p(model)
        self._vocab = ctypes.c_void_p(self._lib.llama_model_get_vocab(self._model))
        params = self._lib.llama_context_default_params()
        params.numbers[0] = params.numbers[1] = params.numbers[2] = context  # n_ctx, n_batch, n_ubatch
        self._context = ctypes.c_void_p(self._lib.llama_init_from_model(self._model, params))
        self._rows = self._lib.llama_vocab_n_tokens(self._vocab)

    def _keep(self, _level: int, line: bytes, _data: object) -> None:
        self.log += line.decode(errors="replace")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, as llama.cpp says when it lays it out."""
        sizes = re.findall(r"KV buffer size = +([\d.]+) MiB", self.log)
        return round(sum(map(float, sizes)) * 2**20)

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text``, with the first token where the tokenizer puts one."""
        ids, raw = (ctypes.c_int32 * ROOM)(), text.encode()
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, ROOM, special, True)
        return list(ids[:count])

    def logits(self, ids: list[int]) -> Tensor:
        """Logits (tokens, vocabulary) of one sequence."""
        self._forget()
        return self._decode(ids, 0)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The ``count`` most likely tokens after ``ids``, one by one through the cache."""
        self._forget()
        row, new = self._decode(ids, 0)[-1], []
        for place in range(len(ids), len(ids) + count):
            new.append(int(row.argmax()))
            row = self._decode(new[-1:], place)[-1]
        return new

    def _forget(self) -> None:
        self._lib.llama_get_memory.restype = ctypes.c_void_p
        self._lib.llama_memory_clear(ctypes.c_void_p(self._lib.llama_get_memory(self._context)), True)

    def _decode(self, ids: list[int], start: int) -> Tensor:
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, start + place, 1
            batch.seq_id[place][0], batch.logits[place] = 0, 1
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError(self.log[-500:])
        rows = self._lib.llama_get_logits(self._context)
        logits = torch.frombuffer(bytearray(ctypes.string_at(rows, 4 * len(ids) * self._rows)), dtype=torch.float32)
        self._lib.llama_batch_free(batch)
        return logits.view(len(ids), -1)
