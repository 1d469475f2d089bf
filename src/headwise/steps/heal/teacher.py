"""What the dense model says to a window, and how far the reduced one is from it."""

from __future__ import annotations

import errno
import hashlib
import os
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from headwise.families.sites import sites_of
from headwise.linalg.divergence import mean_divergence, mean_divergence_of_likely, most_likely, perplexity
from headwise.records.healing import HealConfig
from headwise.tracing.fisher import main_output
from headwise.tracing.scoring import predicts_next

REMEMBERED, JUDGED = 128, 1024  # classes kept of a row of logits: on disk for later rounds, in memory to judge by
IGNORED = -100
SEAL = 8  # bytes
Likely = tuple[Tensor, Tensor]


class Teacher:
    """The dense model as the one to learn from. ``memory`` keeps what it said for later rounds."""

    def __init__(self, model: PreTrainedModel, config: HealConfig, bf16: bool, memory: Memory | None) -> None:
        self.model, self.config, self.memory = model.requires_grad_(False), config, memory
        self.predicts = predicts_next(model)
        self._options = {"use_cache": False} if any(site.cache != "none" for site in sites_of(model)) else {}
        self._options |= {"output_hidden_states": True} if config.hidden else {}
        self._bf16 = bf16
        self._judged: dict[int, Tensor | Likely] = {}

    def loss(self, student: nn.Module, inputs: Mapping[str, Tensor], rows: Tensor, first_round: bool) -> Tensor:
        """How far ``student`` is from this model on the windows ``rows``, which hold ``inputs``."""
        config = self.config
        outputs = self._run(student, inputs)
        predicted, classes = main_output(outputs)
        known = None if first_round or self.memory is None else self._remembered(self.memory, inputs, rows)
        seen = _seen(inputs, predicted)
        if known is not None:
            classes_NK, logs_NK = (part.to(predicted.device)[seen] for part in known)
            total = mean_divergence_of_likely(classes_NK, logs_NK, _outputs(predicted, seen), config.temperature)
        else:
            with torch.no_grad():
                dense = self._run(self.model, inputs)
            wanted = main_output(dense)[0]
            total = _distance(_outputs(wanted, seen), _outputs(predicted, seen), classes, config.temperature)
            if self.memory is not None and classes:
                self.memory.write(rows, wanted, config.temperature)
            if config.hidden:
                total = total + config.hidden * _hidden_error(dense, outputs)
        if config.next_token:
            total = total + config.next_token * _next_token(predicted, inputs)
        return total

    def _remembered(self, memory: Memory, inputs: Mapping[str, Tensor], rows: Tensor) -> Likely | None:
        """What this model has said to these windows; it is asked again where that was lost."""
        known = memory.read(rows)
        if known is None:
            with torch.no_grad():
                memory.write(rows, main_output(self._run(self.model, inputs))[0], self.config.temperature)
            known = memory.read(rows)
        return known

    def distance(self, student: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """The first term of the loss alone, and nothing is remembered."""
        predicted, classes = main_output(self._run(student, inputs))
        with torch.no_grad():
            wanted, _ = main_output(self._run(self.model, inputs))
        seen = _seen(inputs, predicted)
        return _distance(_outputs(wanted, seen), _outputs(predicted, seen), classes, self.config.temperature)

    def judge(self, student: nn.Module, inputs: Mapping[str, Tensor], at_once: int) -> dict[str, float]:
        """KL (or relative square error) on held-out windows, and the perplexity of a decoder."""
        far, nats, classes, parts = 0.0, 0.0, False, _split(inputs, at_once)
        sizes = [_size(part) for part in parts]
        with torch.no_grad():
            for number, part in enumerate(parts):
                share = sizes[number] / sum(sizes)
                predicted, classes = main_output(self._run(student, part))
                far += share * self._judged_distance(number, part, predicted, classes)
                if self.predicts:
                    nats += share * _next_token(predicted, part).item()
        scores = {"kl" if classes else "error": far}
        return {**scores, "perplexity": perplexity(nats)} if self.predicts else scores

    def _judged_distance(self, number: int, part: Mapping[str, Tensor], predicted: Tensor, classes: bool) -> float:
        seen = _seen(part, predicted)
        if number not in self._judged:
            rows = _outputs(main_output(self._run(self.model, part))[0], seen)
            self._judged[number] = most_likely(rows, min(JUDGED, rows.shape[-1])) if classes else rows
        wanted = self._judged[number]
        if isinstance(wanted, Tensor):
            return _distance(wanted, _outputs(predicted, seen), classes, 1.0).item()
        return mean_divergence_of_likely(*wanted, _outputs(predicted, seen)).item()

    def _run(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16) if self._bf16 else nullcontext():
            return model(**{name: tensor.to(device) for name, tensor in inputs.items()}, **self._options)


class Memory:
    """The likeliest classes of every token of every window, in one file: the teacher is asked once about each."""

    def __init__(self, path: Path, inputs_hash: str, length: int, classes: int) -> None:
        path = path.with_name(f"{path.name}-{inputs_hash[:8]}")
        self.path, self.kept = path, min(REMEMBERED, classes)
        self._numbers, self._key = length * self.kept, bytes.fromhex(inputs_hash)
        self._size = 6 * self._numbers + SEAL
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self._file)

    def read(self, rows: Tensor) -> Likely | None:
        """Classes and their log-probabilities for all tokens of these windows, if all are known and as written."""
        numbers = rows.tolist()
        stored = [os.pread(self._file, self._size, row * self._size) for row in numbers]
        if any(raw[-SEAL:] != self._seal(row, raw[:-SEAL]) for row, raw in zip(numbers, stored, strict=True)):
            return None
        whole = b"".join(raw[:-SEAL] for raw in stored)
        parts = np.frombuffer(whole, dtype=np.uint8).reshape(len(stored), -1)
        classes = parts[:, : 4 * self._numbers].copy().view(np.int32)
        logs = parts[:, 4 * self._numbers :].copy().view(np.float16)
        return torch.from_numpy(classes.reshape(-1, self.kept)), torch.from_numpy(logs.reshape(-1, self.kept))

    def write(self, rows: Tensor, logits_BTC: Tensor, temperature: float) -> None:
        """Remember what was said to these windows. The seal behind a window says that it is all there."""
        for row, logits in zip(rows.tolist(), logits_BTC, strict=True):
            classes, logs = (part.cpu() for part in most_likely(logits, self.kept, temperature))
            raw = classes.numpy().tobytes() + logs.half().numpy().tobytes()
            raw += self._seal(row, raw)
            if os.pwrite(self._file, raw, row * self._size) < len(raw):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _seal(self, row: int, raw: bytes) -> bytes:
        return hashlib.blake2b(raw, key=self._key, salt=row.to_bytes(8, "little"), digest_size=SEAL).digest()


def _seen(inputs: Mapping[str, Tensor], outputs: Tensor) -> Tensor:
    """Which of the outputs (all rows behind one another) are of tokens and not of padding."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    if mask is None or mask.shape != outputs.shape[:-1]:
        return torch.ones(outputs.shape[:-1].numel(), dtype=torch.bool, device=outputs.device)
    return mask.flatten().bool().to(outputs.device)


def _outputs(outputs: Tensor, seen: Tensor) -> Tensor:
    flat = outputs.flatten(0, -2)
    return flat if seen.all() else flat[seen]


def _size(inputs: Mapping[str, Tensor]) -> int:
    """What a batch counts for: tokens that are no padding, or rows."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return len(next(iter(inputs.values()))) if mask is None else int(mask.sum())


def _distance(wanted_NC: Tensor, predicted_NC: Tensor, classes: bool, temperature: float) -> Tensor:
    """KL divergence of classes; of other outputs half the square error, relative to their energy."""
    if classes:
        return mean_divergence(wanted_NC, predicted_NC, temperature)
    return _relative_error(wanted_NC, predicted_NC) / 2


def _relative_error(wanted: Tensor, predicted: Tensor) -> Tensor:
    return (predicted.float() - wanted.float()).square().sum() / wanted.float().square().sum()


def _hidden_error(dense: Any, outputs: Any) -> Tensor:
    """Mean relative error of hidden states; where blocks are gone only the last, which both have."""
    wanted, predicted = dense.hidden_states, outputs.hidden_states
    if len(wanted) != len(predicted):
        wanted, predicted = wanted[-1:], predicted[-1:]
    return torch.stack([_relative_error(*pair) for pair in zip(wanted, predicted, strict=True)]).mean()


def _next_token(logits_BTC: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    ids_BT, mask_BT = inputs["input_ids"], inputs.get("attention_mask")
    wanted = ids_BT[:, 1:] if mask_BT is None else ids_BT[:, 1:].masked_fill(mask_BT[:, 1:] == 0, IGNORED)
    wanted = wanted.to(logits_BTC.device).flatten()
    return cross_entropy(logits_BTC[:, :-1].flatten(0, 1).float(), wanted, ignore_index=IGNORED)


def _split(inputs: Mapping[str, Tensor], at_once: int) -> list[dict[str, Tensor]]:
    parts = {name: tensor.split(at_once) for name, tensor in inputs.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
