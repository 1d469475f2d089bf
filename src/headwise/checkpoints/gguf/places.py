"""Where the coordinates of every head stand in a GGUF file: llama.cpp knows one head width and one list of frequencies.

Heads that keep other RoPE pairs or widths are laid into the smallest head that has room for each of them; what a head
does not have is zero. Coordinates that do not turn stand in pairs whose frequency is nought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.families.weights import AttentionWeights

STILL = 1e30  # divides a frequency into nought


@dataclass(frozen=True, slots=True)
class Places:
    """Of each pair of coordinates of a head the number of its frequency, None where it does not turn."""

    pairs: tuple[int | None, ...]

    @property
    def width(self) -> int:
        """Coordinates of a head, of values as well."""
        return 2 * len(self.pairs)

    def factors(self, frequencies_P: Tensor, base: float) -> Tensor:
        """What llama.cpp divides its own frequency of each pair by."""
        own = float(base) ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        wanted = frequencies_P.double()
        return torch.stack([STILL * torch.ones(()) if p is None else o / wanted[p] for p, o in zip(self.pairs, own)])

    def of_heads(self, weights: AttentionWeights) -> Tensor:
        """The place of each query/key coordinate of each key/value head, (G, K): pairs side by side."""
        named = pairs_of(weights)
        return torch.tensor([self._of_head(row, weights.w_k_GKD.shape[1]) for row in named])

    def _of_head(self, pairs: Sequence[int], width: int) -> list[int]:
        free: dict[int | None, list[int]] = {}
        for place, pair in enumerate(self.pairs):
            free.setdefault(pair, []).append(place)
        turning = [free[pair].pop(0) for pair in pairs]
        still = [2 * place + half for place in free.get(None, ()) for half in (0, 1)]
        return [2 * p for p in turning] + [2 * p + 1 for p in turning] + still[: width - 2 * len(pairs)]


def places_for(layers: Iterable[AttentionWeights]) -> Places:
    """The smallest heads that have room for all of ``layers``."""
    most: Counter[int] = Counter()
    still = values = 0
    for weights in layers:
        rows = pairs_of(weights)
        for row in rows:
            most |= Counter(row)
        still = max(still, weights.w_k_GKD.shape[1] - 2 * len(rows[0]))
        values = max(values, weights.w_v_GVD.shape[1])
    turning = [pair for pair in sorted(most) for _ in range(most[pair])]
    room = max(len(turning) + -(-still // 2), -(-values // 2), 1)
    return Places((*turning, *[None] * (room - len(turning))))


def pairs_of(weights: AttentionWeights) -> list[list[int]]:
    """The frequencies of the RoPE pairs of each key/value head."""
    if weights.rope_pairs_GP is not None:
        return weights.rope_pairs_GP.tolist()
    return [list(range(weights.rotary // 2))] * len(weights.w_k_GKD)


def placed(weights: AttentionWeights, places: Places, gain: float) -> dict[str, Tensor]:
    """The matrices (out, in) and biases of one layer by their names in GGUF; logits times ``gain``."""
    place_GK, W = places.of_heads(weights), places.width
    each = len(weights.w_q_HKD) // len(weights.w_k_GKD)
    ratio = weights.scale * W**0.5 * gain
    ratio = 1.0 if abs(ratio - 1) < 1e-6 else ratio  # noqa: PLR2004 - rounding
    place_HK = place_GK.repeat_interleave(each, 0)
    value = torch.arange(weights.w_v_GVD.shape[1])
    parts = {
        "attn_q": (weights.w_q_HKD, weights.b_q_HK, place_HK, ratio),
        "attn_k": (weights.w_k_GKD, weights.b_k_GK, place_GK, 1.0),
        "attn_v": (weights.w_v_GVD, weights.b_v_GV, value.expand(len(place_GK), -1), 1.0),
    }
    tensors = {}
    for name, (weight, bias, place, times) in parts.items():
        tensors[f"{name}.weight"] = times * _spread(weight, place, W).flatten(0, 1)
        if bias is not None:
            tensors[f"{name}.bias"] = times * _spread(bias[..., None], place, W).flatten()
    tensors["attn_output.weight"] = _spread(weights.w_o_HVD, value.expand(len(place_HK), -1), W).flatten(0, 1).T
    if weights.b_o_D is not None:
        tensors["attn_output.bias"] = weights.b_o_D.detach().float()
    return tensors


def _spread(x_NCD: Tensor, place_NC: Tensor, width: int) -> Tensor:
    """Rows at their places among ``width``, zeros between them, in float32."""
    x = x_NCD.detach().float().cpu()
    return x.new_zeros(len(x), width, x.shape[2]).scatter(1, place_NC[..., None].expand_as(x), x)
