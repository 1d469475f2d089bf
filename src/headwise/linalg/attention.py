"""The tensors of one attention call: queries, keys and values that went in, head outputs that came out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values after norms and RoPE, and head outputs before the output projection.

    ``mask`` is True where a query may look (or an additive float), broadcastable to (B, H, T, S); None with ``causal``
    means that query t sees the keys up to t.
    """

    q_BHTK: Tensor
    k_BGSK: Tensor
    v_BGSV: Tensor
    out_BTHV: Tensor
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q_BHTK.shape[1]

    @property
    def overflows(self) -> bool:
        """Whether the outputs, or a bound on the logits, exceed float32."""
        largest = self.q_BHTK.abs().amax().double() * self.k_BGSK.abs().amax().double() * self.q_BHTK.shape[-1]
        fits = largest * abs(self.scale) < torch.finfo(torch.float32).max
        return not (fits and self.out_BTHV.isfinite().all())

    def leading(self, length: int) -> Attention:
        """The first ``length`` tokens of a causal attention, which see nothing of what comes after them."""
        if self.q_BHTK.shape[2] <= length:
            return self
        return replace(
            self,
            q_BHTK=self.q_BHTK[:, :, :length],
            k_BGSK=self.k_BGSK[:, :, :length],
            v_BGSV=self.v_BGSV[:, :, :length],
            out_BTHV=self.out_BTHV[:, :length],
            mask=None if self.mask is None else self.mask[..., :length, :length],
        )

    def logits(self, heads: slice, rows: slice | Tensor, keys_BGSK: Tensor | None = None) -> Tensor:
        """Logits of the named query heads and rows in float32, minus infinity where a query must not look.

        ``keys_BGSK`` replace the recorded keys.
        """
        k = self.k_BGSK if keys_BGSK is None else keys_BGSK
        group = torch.arange(self.heads, device=k.device)[heads] // (self.heads // k.shape[1])
        logits = (self.q_BHTK[:, heads, rows].float() * self.scale) @ k[:, group].float().mT
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh_().mul_(self.softcap)
        if self.mask is not None:
            mask = self.mask.expand(-1, -1, self.q_BHTK.shape[2], -1)[:, :, rows]
            mask = mask[:, heads] if mask.shape[1] > 1 else mask
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
            logits.masked_fill_(hidden, -torch.inf)
        elif self.causal:
            index = torch.arange(self.q_BHTK.shape[2], device=k.device)
            logits.masked_fill_(index[rows][:, None] < index, -torch.inf)
        return logits
