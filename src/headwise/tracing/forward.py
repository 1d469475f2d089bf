"""One forward pass of any model over a batch on any device, without a cache."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.sites import sites_of


def forward(model: PreTrainedModel, inputs: dict[str, Tensor], *, head: bool = True) -> Any:
    """The outputs of ``model`` for ``inputs``; without its ``head`` the last hidden states."""
    caching = {"use_cache": False} if any(site.cache != "none" for site in sites_of(model)) else {}
    return cast(Any, model if head else model.base_model)(**placed_inputs(model, inputs), **caching)


def placed_inputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``inputs`` where ``model`` is and, where they are no whole numbers, in its precision."""
    return {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
    }
