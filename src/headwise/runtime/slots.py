"""Where the tokens of a forward pass are: their turns by RoPE, and which slots of a packed cache they may read.

Self-contained: it travels with a model. A sequence lies in slots 0, 1, ..; padding in front takes slots too, so the
position of a token may be behind its slot, by as much for all tokens of a sequence.

Letters: B batch, T new tokens, P rotary pairs.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 256  # slots that share one table of turns
BLOCK = 4096  # slots of a block; only the last one grows, by chunks
RECENT = 16  # tokens that are packed together: until then the last ones stay whole
HIDDEN = -1e30  # a logit that counts for nothing; finite, so that differences of two are no NaN


class Rope:
    """The rotations of a model: frequencies (P,), what the model multiplies them by, and one table for a chunk."""

    def __init__(self, model, rotary: int) -> None:
        self.scale, frequencies = 1.0, torch.zeros(0, device=model.device)
        if rotary:
            refuse_changing_rope(model)
            names = {"inv_freq": "attention_scaling", "full_attention_inv_freq": "full_attention_attention_scaling"}
            known = ((m, name) for m in model.modules() for name in names if getattr(m, name, None) is not None)
            module, name = next(known, (None, ""))
            if module is None:
                raise ValueError(f"{type(model).__name__} has no frequencies of RoPE that a packed cache could read.")
            frequencies, self.scale = getattr(module, name), getattr(module, names[name], 1.0)
        self.frequencies = frequencies.detach().float()
        table = self.phases(torch.arange(CHUNK, device=frequencies.device))
        self.cos, self.sin = table.real.contiguous(), table.imag.contiguous()

    def phases(self, slots: torch.Tensor) -> torch.Tensor:
        """Rotations (P, ...) of ``slots``."""
        angles = self.frequencies.double().view(-1, *[1] * slots.ndim) * slots
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def as_model(self, positions: torch.Tensor) -> torch.Tensor:
        """Rotations (P, ...) of ``positions``, rounded as the model rounds them."""
        angles = self.frequencies.view(-1, *[1] * positions.ndim) * positions.float()
        return torch.polar(torch.ones_like(angles), angles)


def refuse_changing_rope(model) -> None:
    """Raise where the turn of a token depends on more than its one position."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for each in (parameters, *(each for each in parameters.values() if isinstance(each, dict))):
        kind = each.get("rope_type")
        changing = kind == "longrope" and list(each["short_factor"]) != list(each["long_factor"])
        if kind == "dynamic" or changing or "mrope_section" in each:
            raise ValueError(f"A packed cache needs RoPE whose turns depend on the position alone; {each} does not.")


class Pass:
    """One forward pass: where its tokens are in the sequences, and what of the cache they may read."""

    def __init__(self, cache: Any, past: int, batch: int, tokens: int, packed: int, positions, mask) -> None:
        self.cache, self.past, self.tokens, self.positions, self.mask = cache, past, tokens, positions, mask
        self.packed, self.unturns = packed, {}
        self.device = device = cache.rope.frequencies.device
        slots = torch.arange(past, past + tokens, device=device)
        self.batch, self.biases = batch, {}
        if not past:
            cache.padding = torch.zeros(batch, dtype=torch.long, device=device)
        if mask is not None:
            if mask.ndim != 4 or mask.shape[1] != 1:  # noqa: PLR2004 - as transformers makes them
                raise ValueError(f"A packed cache reads masks (batch, 1, queries, slots), not {tuple(mask.shape)}.")
            last = mask[:, 0, -1, : past + tokens]
            seen = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
            first = torch.where(seen.any(-1), seen.int().argmax(-1), past + tokens)
            # A row may have been padding so far: then its first token comes now.
            cache.padding = torch.where(first >= past, first, cache.padding)
        self.whole_ends = int(cache.padding.max()) + cache.spec.whole
        if cache.rope.frequencies.numel():
            places = slots.expand(batch, -1) if positions is None else positions.to(device).expand(batch, -1)
            self._follow(slots, places, past)

    def is_of(self, past: int, batch: int, tokens: int, packed: int, positions: Any, mask: Any) -> bool:
        """Whether another layer is in the same pass: then it was handed the very same tensors."""
        same = (self.past, self.batch, self.tokens, self.packed) == (past, batch, tokens, packed)
        return same and self.positions is positions and self.mask is mask

    def unturn(self, start: int, stop: int):
        """Rotations (P, B, stop - start) that undo the model's in some slots; None without RoPE."""
        rope = self.cache.rope
        if not rope.frequencies.numel():
            return None
        if (start, stop) not in self.unturns:
            places = torch.arange(start, stop, device=self.device) - self.cache.ahead[:, None]
            self.unturns[start, stop] = rope.as_model(places).conj() / rope.scale
        return self.unturns[start, stop]

    @cached_property
    def visible(self):
        """What is added to logits (B, T, slots so far)."""
        batch, length = self.batch, self.past + self.tokens
        if self.mask is None:
            slots = torch.arange(length, device=self.device)
            hidden = slots > slots[self.past :, None]
            return torch.zeros(hidden.shape, device=self.device).masked_fill(hidden, HIDDEN).expand(batch, -1, -1)
        mask = self.mask[:, 0, :, :length]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, HIDDEN)
        return mask.float().clamp(min=HIDDEN).expand(batch, -1, -1)

    def _follow(self, slots, places, past):
        """Keep how far slots are ahead of positions; it must not change within a sequence."""
        cache, ahead = self.cache, slots[-1] - places[:, -1]
        old = cache.ahead if past else ahead
        new_row = cache.padding >= past
        steady = (ahead == old) | new_row
        real = slots >= cache.padding[:, None]
        if not (steady.all() and ((slots - places == ahead[:, None]) | ~real).all()):
            raise ValueError("A packed cache needs positions that rise by one from token to token of a sequence.")
        cache.ahead = ahead
        self.turned = bool(ahead.any())

    @cached_property
    def turn(self):
        """Rotations (P, B) from positions to slots."""
        return self.cache.rope.phases(self.cache.ahead) if self.turned else None

    @cached_property
    def phases(self):
        """Rotations (P, chunks) back by the first slots of all chunks."""
        return self.cache.rope.phases(-torch.arange(0, self.slots, CHUNK, device=self.device))

    @property
    def slots(self) -> int:
        """Slots that blocks may have room for."""
        return -(-(self.past + self.tokens) // BLOCK) * BLOCK

    def bias(self, start: int, size: int):
        """What is added to the logits of some packed slots (B, T, size)."""
        if (start, size) not in self.biases:
            self.biases[start, size] = self.all_bias[..., start : start + size].contiguous()
        return self.biases[start, size]

    @cached_property
    def all_bias(self):
        """What is added to the logits of packed slots (B, T, slots)."""
        length, padding = self.visible.shape[-1], self.cache.padding[:, None]
        index = torch.arange(length, device=self.device)
        whole = (index >= padding) & (index < padding + self.cache.spec.whole)
        elsewhere = whole | (index >= self.packed)
        return F.pad(self.visible.masked_fill(elsewhere[:, None], HIDDEN), (0, self.slots - length), value=HIDDEN)

    @cached_property
    def whole_bias(self):
        """What is added to the logits of tokens kept whole, first and recent ones (B, T, whole + RECENT)."""
        length, padding, whole = self.visible.shape[-1], self.cache.padding[:, None], self.cache.spec.whole
        first = padding + torch.arange(whole, device=self.device)
        recent = torch.arange(self.packed, self.packed + RECENT, device=self.device).expand(self.batch, -1)
        twice = (recent >= padding) & (recent < padding + whole)
        hidden = torch.cat((first >= length, twice | (recent >= length)), dim=1)
        index = torch.cat((first, recent), dim=1).clamp(max=length - 1)[:, None].expand(-1, self.tokens, -1)
        return self.visible.gather(2, index).masked_fill(hidden[:, None], HIDDEN)
