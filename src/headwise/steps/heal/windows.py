"""What a model is healed on: windows of text or ready-made inputs, in an order that only a seed decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.calibration import Calibration, file_calibration, window_calibration
from headwise.families.shapes import shape_of
from headwise.families.texts import read_texts
from headwise.records.errors import InputError
from headwise.records.healing import Healing
from headwise.training.order import shuffled

MOST_HELD_OUT = 0.1  # of all windows


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
        """Numbers of the first input in a row: tokens of text."""
        return next(iter(self.rows.values())).shape[1]

    def order(self, first: int, number: int, seed: int) -> Tensor:
        """Which rows are places ``first`` to ``first + number``: every round through all of them is shuffled anew."""
        return shuffled(self.count, first, number, seed)


def read_windows(
    model: PreTrainedModel,
    source: str,
    texts: list[str],
    inputs: Path | None,
    how: Healing,
    *,
    trust_remote_code: bool = False,
) -> Windows:
    """The text (or arrays, or pictures) that ``model`` is healed on; the last windows are held out."""
    wanted = how.tokens + how.held_out
    if inputs is not None:
        found = file_calibration(model, source, inputs, wanted, trust_remote_code=trust_remote_code)
    else:
        text, name = read_texts(texts)
        shape = shape_of(model)
        context = min(how.context, shape.max_tokens or how.context)
        wanted = max(wanted, 2 * context)
        found = window_calibration(
            model, shape, source, text, name, wanted, context, trust_remote_code=trust_remote_code
        )
    rows = _joined(found)
    total = len(next(iter(rows.values())))
    if total < 2:  # noqa: PLR2004 - one to learn from, one to measure on
        raise InputError(f"{found.name} holds a single window: give more text or a shorter context.")
    one = found.tokens / total
    held = max(1, min(round(how.held_out / one), int(MOST_HELD_OUT * total)))
    split = {name: tensor.split([total - held, held]) for name, tensor in rows.items()}
    return Windows(
        {name: parts[0] for name, parts in split.items()},
        {name: parts[1] for name, parts in split.items()},
        one,
        found.name,
        found.sha256,
    )


def _joined(found: Calibration) -> dict[str, Tensor]:
    made = {}
    for name in found.batches[0].inputs:
        parts = [batch.inputs[name] for batch in found.batches if batch.main]
        if len({part.shape[1:] for part in parts}) > 1:
            raise InputError(f"{found.name} has examples of different lengths: give {name} of one length.")
        made[name] = torch.cat(parts)
    return made
