"""What a model loses where RoPE pairs of one layer no longer turn, measured by running what comes behind.

Predictions from gradients fail here by far. So the slowest pairs of each layer are let go, more and more of them, over
windows as long as the model was measured on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.files.progress import Progress, silent
from headwise.records.shape import LayerShape
from headwise.runtime.modeling_headwise import grouped_attention, padded_attention
from headwise.tracing.fisher import kl_from_baseline
from headwise.tracing.forward import forward
from headwise.tracing.interface import attending
from headwise.tracing.substitution import recorded, some_tokens, starting
from headwise.tracing.turns import Turns, turning

TURNS = (0.5, 1.0, 1.75, 3.0)  # radians over a whole window: pairs that turn less are let go together
TOKENS = 512  # at least, and one whole window


def candidates(layer: LayerShape, frequencies_P: Tensor, context: int) -> list[int]:
    """Numbers of the slowest RoPE pairs to try without a position, none first."""
    if not layer.rotary:
        return [0]
    return sorted({0, *(int((frequencies_P * context <= turn).sum()) for turn in TURNS)})


def positions_lost(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    layers: Sequence[int],
    progress: Progress = silent,
) -> dict[int, dict[int, float]]:
    """For each of the ``layers`` the KL divergence in nats per output by how many pairs lose their position."""
    sites, shape = sites_of(model), shape_of(model)
    blocks = [site.block for site in sites]
    context = max(batch[model.main_input_name].shape[1] for batch in batches)
    chosen = some_tokens(batches, max(TOKENS, context))
    totals: dict[int, dict[int, float]] = {i: {} for i in layers}
    outputs = 0
    with torch.inference_mode(), turning(model) as turns, _letting_go(model, turns) as free:
        for batch in chosen:
            with recorded(blocks) as calls:
                baseline = forward(model, batch)
            outputs += kl_from_baseline(baseline, baseline).numel()
            for done, i in enumerate(layers):
                progress(done, len(layers), "letting positions go")
                for count in candidates(shape.layers[i], turns.frequencies(), context):
                    free[:] = [sites[i].module, count] if count else []
                    nats = 0.0
                    if count:
                        with starting(blocks[:i], calls[i].hidden):
                            nats = kl_from_baseline(baseline, forward(model, batch)).double().sum().item()
                    totals[i][count] = totals[i].get(count, 0.0) + nats
                free.clear()
    return {i: {count: max(0.0, nats / outputs) for count, nats in own.items()} for i, own in totals.items()}


@contextmanager
def _letting_go(model: PreTrainedModel, turns: Turns) -> Generator[list[Any], None, None]:
    """In the block the module named first in the list that is given turns so many of its slowest pairs no more."""
    free: list[Any] = []
    before = model.config._attn_implementation or "sdpa"
    backend = ALL_ATTENTION_FUNCTIONS.get_interface(before, grouped_attention)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if free and module is free[0]:
            still = turns.slowest(q.shape[-1], free[1]).to(q.device)
            q, k = (torch.where(still, turns.back(x, None), x) for x in (q, k))
        if k.shape[-1] == v.shape[-1] or getattr(backend, "any_width", False):
            return backend(module, q, k, v, mask, **kwargs)
        return padded_attention(backend, module, q, k, v, mask, **kwargs)

    with attending(model, attend, ALL_MASK_ATTENTION_FUNCTIONS[before]):
        yield free
