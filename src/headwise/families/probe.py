"""Watching the attention of any model through the one seam transformers offers, without touching its code."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headwise.families.modeling_headwise import grouped_attention

Watcher = Callable[[str, Tensor, Tensor, Tensor], None]
NAME = "headwise_watched"


@contextmanager
def watching(model: PreTrainedModel, watcher: Watcher) -> Generator[None, None, None]:
    """Call ``watcher(path, q_BHTK, k_BGTK, v_BGTV)`` at every attention of every forward pass.

    ``path`` starts at ``model.base_model``, as in `Site.path`. Tensors arrive after norms and rotary positions and
    before the softmax, at their true widths. Keep statistics, not tensors.
    """
    paths = {id(module): name for name, module in model.base_model.named_modules()}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        watcher(paths[id(module)], q, k, v)
        # sdpa knows neither capped logits nor, without its slow path, unequal widths.
        if kwargs.get("softcap") is not None:
            return grouped_attention(module, q, k, v, mask, **kwargs)
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without this, masks silently become None
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping[NAME]
        del AttentionMaskInterface._global_mapping[NAME]
