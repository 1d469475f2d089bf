"""Watching the attention of any model through transformers' attention interface, without touching its code."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from headwise.linalg.attention import Attention
from headwise.runtime.modeling_headwise import grouped_attention, padded_attention
from headwise.tracing.interface import attending

Watcher = Callable[[str, Attention], None]


@contextmanager
def watching(model: PreTrainedModel, watcher: Watcher) -> Generator[None, None, None]:
    """Call ``watcher(path, attention)`` at every attention of every forward pass.

    ``path`` starts at ``model.base_model``, as in `Site.path`. Tensors come unpadded. Keep statistics, not tensors.

    >>> paths = []
    >>> with hw.watching(model, lambda path, attention: paths.append(path)):
    ...     output = model(**tokenizer("some text", return_tensors="pt"))
    >>> paths[0]
    'layers.0.self_attn'
    """
    paths = {id(module): path for path, module in model.base_model.named_modules()}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if capped:  # sdpa cannot cap logits
            output, weights = grouped_attention(module, q, k, v, mask, **kwargs)
        else:
            output, weights = padded_attention(sdpa_attention_forward, module, q, k, v, mask, **kwargs)
        causal = kwargs.get("is_causal")
        seen = Attention(
            q_BHTK=q,
            k_BGSK=k,
            v_BGSV=v,
            out_BTHV=output,
            scale=q.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"],
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal) and q.shape[2] > 1,
            mask=mask,
            softcap=kwargs.get("softcap"),
        )
        watcher(paths[id(module)], seen)
        return output, weights

    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    # sdpa's masks are None where the kernel is causal itself.
    with attending(model, attend, eager_mask if capped else sdpa_mask):
        yield
