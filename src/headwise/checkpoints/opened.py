"""Opening a model where and as it is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from headwise.checkpoints.load import open_model
from headwise.files.errors import InputError
from headwise.records.settings import Dtype
from headwise.tracing.placement import PRECISIONS, device_named


def open(source: str | Path, device: str = "auto", dtype: Dtype = "auto") -> PreTrainedModel:
    """The trained model at ``source``, a local folder or a Hub id: stock, or as headwise saved it.

    ``device`` "auto" is a GPU if there is one, ``dtype`` "auto" the model's own. Weights come from safetensors only,
    and no code that comes with a model is run.

    >>> model = hw.open(source, device="cpu")
    >>> hw.shape_of(model).layers[0].heads
    4
    """
    return placed(open_model(str(source)), device, dtype)


def placed(model: PreTrainedModel, device: str, dtype: Dtype) -> PreTrainedModel:
    """``model`` itself, moved to where and turned into what these settings say."""
    if dtype != "auto" and dtype not in PRECISIONS:
        raise InputError(f"`dtype` must be auto, {', '.join(PRECISIONS)}, got {dtype!r}.")
    model = cast(Any, model).to(device_named(device))
    for parameter in model.parameters() if dtype != "auto" else ():
        parameter.data = parameter.data.to(PRECISIONS[dtype])  # not buffers: RoPE frequencies want all their digits
    return model
