"""The angles by which RoPE turns keys in the attention that is running, and keys before that."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.runtime.modeling_headwise import rotate


class Turns:
    """Cosines and sines (B, T, 2P) that the last attention was called with; None of a model without RoPE."""

    def __init__(self) -> None:
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self.unknown = ""

    def back(self, k_BGTK: Tensor, pairs_GP: Tensor | None) -> Tensor:
        """Keys as they were before they were turned."""
        cos, sin = self._for(k_BGTK, pairs_GP)
        if cos is None or sin is None:
            return k_BGTK
        P = cos.shape[-1] // 2
        size = (cos.square() + sin.square())[..., :P]  # some kinds of RoPE also stretch
        return rotate(k_BGTK, cos / torch.cat((size, size), -1), -sin / torch.cat((size, size), -1))

    def on(self, k_BGTK: Tensor, pairs_GP: Tensor | None) -> Tensor:
        """Keys turned."""
        cos, sin = self._for(k_BGTK, pairs_GP)
        return k_BGTK if cos is None or sin is None else rotate(k_BGTK, cos, sin)

    def gradient(self, grad_BGTK: Tensor, pairs_GP: Tensor | None) -> Tensor:
        """The gradient by keys before they were turned, from that by keys after."""
        cos, sin = self._for(grad_BGTK, pairs_GP)
        return grad_BGTK if cos is None or sin is None else rotate(grad_BGTK, cos, -sin)

    def frequencies(self) -> Tensor:
        """Radians by which each pair turns from one token to the next, (P,); empty without RoPE."""
        if self.cos is None or self.sin is None or self.cos.shape[1] < 2:  # noqa: PLR2004 - tokens
            return torch.zeros(0)
        half = self.cos.shape[-1] // 2
        first, second = (torch.atan2(self.sin[0, place, :half], self.cos[0, place, :half]) for place in (0, 1))
        return (second - first).abs().cpu()

    def slowest(self, width: int, count: int) -> Tensor:
        """Marks (width,) the coordinates of the ``count`` slowest pairs of a head."""
        half = 0 if self.cos is None else self.cos.shape[-1] // 2
        pair = torch.arange(width) % max(1, half)
        return (torch.arange(width) < 2 * half) & (pair >= half - count)

    def _for(self, x: Tensor, pairs_GP: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if self.unknown:
            raise InputError(f"The rotary module {self.unknown} of this model gives something else than angles.")
        if self.cos is None or self.sin is None:
            return None, None
        if pairs_GP is None:
            cos, sin = self.cos[:, None], self.sin[:, None]
        else:  # each head keeps pairs of its own
            cos, sin = (t[..., pairs_GP].transpose(1, 2) for t in (self.cos, self.sin))
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return cos.to(x.dtype), sin.to(x.dtype)


def turns_alike(model: PreTrainedModel) -> bool:
    """Whether one rotary module, or none, serves all layers, and its angles depend on positions alone."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return not hasattr(model.base_model, "rotary_emb_local")
    kind = getattr(rotary, "rope_type", "default")
    return (
        isinstance(kind, str)
        and kind != "dynamic"
        and not isinstance(getattr(rotary, "layer_types", None), (list, set))
    )


@contextmanager
def turning(model: PreTrainedModel) -> Generator[Turns, None, None]:
    """The turns of whatever attention of ``model`` runs in the block.

    They are those that each attention is given: blocks may run by themselves, with angles computed long before.
    """
    turns = Turns()
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        yield turns
        return

    def see(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        angles = kwargs.get("position_embeddings")
        if isinstance(angles, tuple) and len(angles) == 2:  # noqa: PLR2004 - cosines and sines
            turns.cos, turns.sin = angles
        else:
            turns.unknown = type(rotary).__name__

    handles = [site.module.register_forward_pre_hook(see, with_kwargs=True) for site in sites_of(model)]
    try:
        yield turns
    finally:
        for handle in handles:
            handle.remove()
