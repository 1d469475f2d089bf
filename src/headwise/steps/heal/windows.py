"""What a model is healed on: windows of text or ready-made inputs, in an order that only a seed decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from headwise.data.calibration import Batch, Calibration, check_reads_text, evaluation_windows
from headwise.data.processors import open_tokenizer
from headwise.data.ready import are_batches, input_calibration
from headwise.data.texts import Text, read_texts, texts_of
from headwise.data.windows import has_chat
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records.healing import HealConfig
from headwise.records.settings import ReadConfig
from headwise.tracing.scoring import predicts_next
from headwise.training.order import shuffled

MOST_HELD_OUT = 0.1  # of all windows
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


@dataclass(frozen=True, slots=True)
class Windows:
    """Rows of model inputs to learn from, and ``held_out`` ones to measure on."""

    rows: dict[str, Tensor]
    held_out: dict[str, Tensor]
    tokens_each: float
    name: str
    sha256: str

    @property
    def count(self) -> int:
        """Rows to learn from."""
        return len(next(iter(self.rows.values())))

    @property
    def length(self) -> int:
        """Tokens of text in a row."""
        return self.rows["input_ids"].shape[1] if "input_ids" in self.rows else 0

    def order(self, first: int, number: int, seed: int) -> Tensor:
        """Which rows are places ``first`` to ``first + number``: every round through all of them is shuffled anew."""
        return shuffled(self.count, first, number, seed)


def read_windows(
    model: PreTrainedModel,
    source: str,
    texts: Sequence[str],
    inputs: Path | None,
    config: HealConfig,
    reading: ReadConfig | None = None,
    *,
    trust_remote_code: bool = False,
) -> Windows:
    """The text (or arrays, or pictures) in files that ``model`` is healed on; the last of each kind are held out."""
    reading = reading or ReadConfig()
    if inputs is not None:
        wanted = config.tokens + config.held_out
        calibration = input_calibration(model, source, inputs, wanted, trust_remote_code=trust_remote_code)
        return _windows(model, calibration, config)
    check_reads_text(model, source)
    tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
    records = read_texts(list(texts), reading.text_format, chat=has_chat(tokenizer) and predicts_next(model))
    return _windows(model, _cut(model, source, tokenizer, records, config, reading), config)


def own_windows(
    model: PreTrainedModel, tokenizer: Any, text: Any, inputs: Any, config: HealConfig, reading: ReadConfig
) -> Windows:
    """The same of text in memory (what `texts_of` takes), or of batches as the model takes them."""
    if are_batches(text):
        text, inputs = None, text
    if inputs is not None:
        wanted = config.tokens + config.held_out
        return _windows(model, input_calibration(model, "`student`", inputs, wanted), config)
    check_reads_text(model, "`student`")
    texts = texts_of(text, reading.text_format, chat=has_chat(tokenizer) and predicts_next(model))
    return _windows(model, _cut(model, "`student`", tokenizer, texts, config, reading), config)


def _cut(
    model: PreTrainedModel,
    source: str,
    tokenizer: Any,
    texts: Sequence[Text],
    config: HealConfig,
    reading: ReadConfig,
) -> Calibration:
    shape = shape_of(model)
    context = min(config.context, shape.max_tokens or config.context)
    wanted = max(config.tokens + config.held_out, 2 * context)
    accept = reading.accept_text
    calibration = evaluation_windows(model, shape, source, tokenizer, texts, wanted, context, accept=accept)
    return replace(calibration, notes=[])  # a text that is short is read again


def _windows(model: PreTrainedModel, calibration: Calibration, config: HealConfig) -> Windows:
    batches = [*calibration.batches, *calibration.held_out]
    rows: list[dict[str, Tensor]] = []
    held: list[dict[str, Tensor]] = []
    total = sum(len(batch.inputs[model.main_input_name]) for batch in batches)
    if total < 2:  # noqa: PLR2004 - one to learn from, one to measure on
        raise InputError(f"{calibration.name} holds a single window: give more text or a shorter context.")
    tokens = sum(batch.tokens for batch in batches)
    share = min(config.held_out / tokens, MOST_HELD_OUT)
    for kind in dict.fromkeys(batch.kind for batch in batches):
        mine = [row for batch in batches if batch.kind == kind for row in _rows(batch)]
        last = max(1, min(round(share * len(mine)), len(mine) - 1))
        rows += mine[:-last]
        held += mine[-last:]
    longest = {name: max(row[name].shape[0] for row in (*rows, *held)) for name in rows[0]}
    return Windows(_padded(rows, longest), _padded(held, longest), tokens / total, calibration.name, calibration.sha256)


def _rows(batch: Batch) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch.inputs, row, strict=True))
        for row in zip(*(tensor for tensor in batch.inputs.values()), strict=True)
    ]


def _padded(rows: Sequence[dict[str, Tensor]], longest: dict[str, int]) -> dict[str, Tensor]:
    """All rows as one tensor of each input. Tokens of rows of different lengths get zeros behind them and a mask."""
    padded = {}
    for name, length in longest.items():
        parts = [row[name] for row in rows]
        if name in MASKS and any(len(part) < length for part in parts):
            mask = torch.stack([(torch.arange(length) < len(part)).long() for part in parts])
            padded[MASKS[name]] = mask
        padded[name] = torch.stack([pad(part, (0, length - len(part))) if part.ndim == 1 else part for part in parts])
    return padded
