"""Watching the attention of any model through the one seam transformers offers, without touching its code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from headwise.families.modeling_headwise import grouped_attention, padded_attention

Watcher = Callable[[str, Tensor, Tensor, Tensor], None]
NUMBERS = itertools.count()


@contextmanager
def watching(model: PreTrainedModel, watcher: Watcher) -> Generator[None, None, None]:
    """Call ``watcher(path, q_BHTK, k_BGTK, v_BGTV)`` at every attention of every forward pass.

    ``path`` starts at ``model.base_model``, as in `Site.path`. Tensors arrive after norms and rotary positions and
    before the softmax, at their true widths. Keep statistics, not tensors.
    """
    paths = {id(module): path for path, module in model.base_model.named_modules()}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        watcher(paths[id(module)], q, k, v)
        if capped:  # sdpa cannot cap logits
            return grouped_attention(module, q, k, v, mask, **kwargs)
        return padded_attention(sdpa_attention_forward, module, q, k, v, mask, **kwargs)

    attend.any_width = True  # pyrefly: ignore[missing-attribute]
    name = f"headwise_watched_{next(NUMBERS)}"  # several models may be watched at once
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    before = model.config._attn_implementation or "sdpa"
    AttentionInterface.register(name, attend)
    # Without a mask function of its own, masks silently become None; sdpa's are None where the kernel is causal itself.
    AttentionMaskInterface.register(name, eager_mask if capped else sdpa_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping[name]
        del AttentionMaskInterface._global_mapping[name]
