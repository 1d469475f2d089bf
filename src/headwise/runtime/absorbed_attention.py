"""Attention that reads a cache of a few RoPE pairs and one latent for each block of key/value heads.

A block of J neighbouring heads caches P complex numbers of RoPE frequencies, mixed across its heads, and R numbers
without a position. Every key of a head is a complex multiple of the first and a linear map of the second, every value a
linear map of the second. One token reads them through its query, and nothing is rebuilt; many tokens at once do better
with keys and values in full.

Letters: B batch, T tokens, S cached tokens, M blocks, J heads of a block, G = M J key/value heads, h query heads of
each, N RoPE pairs of a query, P cached pairs, F coordinates of a key that have no position, R latent, V value width.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

READS_LATENTS = ("sdpa", "eager")  # backends whose masks are None or say for every query what it may see


class NoPairs(nn.Module):
    """What stands where a projection has nothing left to give."""

    bias = None

    def forward(self, hidden_states):
        return hidden_states[..., :0]


def attention_weights(module, logits, attention_mask, dtype, dropout=0.0, softcap=None):
    """The softmax of ``logits`` (B, H, T, S) where ``attention_mask`` lets them be seen, in ``dtype``."""
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
        else:
            logits = logits + attention_mask
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(dtype)
    return F.dropout(weights, p=dropout, training=module.training)


class AbsorbedAttention:
    """Mixed into a reduced attention module, whose keys are cached pairs and whose values are latents."""

    def absorb(self, absorbed, v_dim, pairs):
        """Take the shape that a config names: its parameters are to be filled."""
        G, free = self.kv_heads, self.head_dim - 2 * pairs
        self.joined, self.query_pairs, self.v_dim = absorbed["joined"], pairs, v_dim
        self.cached_heads = G // self.joined
        rank, kept = absorbed["rank"], absorbed["pairs"]
        self.factors = nn.Parameter(torch.zeros(2, G, kept))
        self.key_maps = nn.Parameter(torch.zeros(G, free, rank))
        self.value_maps = nn.Parameter(torch.zeros(G, rank, v_dim))
        self.value_shift = nn.Parameter(torch.zeros(G, v_dim))
        self.register_buffer("cached_rope_pairs", torch.zeros(self.cached_heads, kept, dtype=torch.long))
        # Keys and values are rebuilt where that takes fewer products than reading latents does.
        saved = self.heads * 2 * (kept + rank) - self.heads * (self.head_dim + v_dim)
        self.few = G * rank * (free + v_dim) // saved if saved > 0 else 1 << 40

    def _rotate(self, query, key, cos, sin):
        if not self.query_pairs:
            return query, key
        turn = [t[:, None] for t in (cos[..., self.rope_pairs[0]], sin[..., self.rope_pairs[0]])]
        query = torch.cat(
            (turned(query[..., : 2 * self.query_pairs], *turn), query[..., 2 * self.query_pairs :]), dim=-1
        )
        turn = [t[..., self.cached_rope_pairs].transpose(1, 2) for t in (cos, sin)]
        return query, turned(key, *turn)

    def _store(self, cache, key, value):
        # Latents are what is always there: caches tell their length by the first of the two.
        value, key = cache.update(value, key, self.layer_idx)
        return key, value

    def fitting(self, attend, backend, query, value, attention_mask):
        """A function that reads latents where that is quicker, else ``attend`` with keys and values rebuilt."""
        T = query.shape[2]
        if backend in READS_LATENTS and (T == 1 or (attention_mask is not None and self.few >= T)):
            return AbsorbedAttention.read
        return functools.partial(rebuilt_attention, attend, backend)

    def _places(self):
        """Which pair of a query each cached pair meets, (M, P)."""
        return torch.searchsorted(self.rope_pairs[0], self.cached_rope_pairs).clamp(max=self.query_pairs - 1)

    def read(self, query, key, value, mask, scaling, dropout=0.0, softcap=None, **kwargs):
        """Attention functions of transformers do this for keys and values; here they are pairs and latents."""
        B, H, T, _ = query.shape
        M, G, S = self.cached_heads, self.kv_heads, value.shape[2]
        grouped = (query * scaling).reshape(B, G, H // G * T, -1)
        free = grouped[..., 2 * self.query_pairs :] @ self.key_maps
        logits = free.reshape(B, M, -1, free.shape[-1]) @ value.transpose(-1, -2)
        if self.query_pairs:
            logits = logits + self._turned_queries(grouped).reshape(B, M, H // M * T, -1) @ key.transpose(-1, -2)
        weights = attention_weights(self, logits.view(B, H, T, S), mask, query.dtype, dropout, softcap)
        summed = weights.view(B, M, H // M * T, S) @ value
        output = summed.view(B, G, H // G * T, -1) @ self.value_maps + self.value_shift[:, None]
        return output.view(B, H, T, -1).transpose(1, 2).contiguous(), weights

    def _turned_queries(self, grouped):
        """Queries as the cached pairs of their block see them: (B, G, h T, 2P)."""
        places = self._places().repeat_interleave(self.joined, dim=0)[None, :, None]
        first, second = grouped[..., : 2 * self.query_pairs].chunk(2, dim=-1)
        places = places.expand(*first.shape[:-1], -1)
        first, second = first.gather(-1, places), second.gather(-1, places)
        real, imaginary = self.factors[:, :, None]
        return torch.cat((real * first + imaginary * second, real * second - imaginary * first), dim=-1)

    def rebuilt(self, key, value):
        """Keys and values of every head, (B, G, S, 2N + F) and (B, G, S, V)."""
        B, M, S, _ = value.shape
        maps = torch.cat((self.key_maps.transpose(1, 2), self.value_maps), dim=-1)
        maps = maps.unflatten(0, (M, self.joined)).transpose(1, 2).flatten(2)  # (M, R, J (F + V))
        rebuilt = (value @ maps).view(B, M, S, self.joined, -1).transpose(2, 3).flatten(1, 2)
        free, value = rebuilt.split([self.key_maps.shape[1], self.v_dim], dim=-1)
        if self.query_pairs:
            free = torch.cat((self._turned_keys(key), free), dim=-1)
        return free, value + self.value_shift[:, None]

    def _turned_keys(self, key):
        """The RoPE pairs of every head, (B, G, S, 2N)."""
        met = F.one_hot(self._places(), self.query_pairs).to(key.dtype).repeat_interleave(self.joined, dim=0)
        real, imaginary = (part[..., None] * met for part in self.factors)  # (G, P, N)
        maps = torch.cat((torch.cat((real, imaginary), dim=-1), torch.cat((-imaginary, real), dim=-1)), dim=-2)
        return (key[:, :, None] @ maps.unflatten(0, (-1, self.joined))).flatten(1, 2)


def turned(x, cos, sin):
    """Turn pairs made of the two halves of the last axis of ``x`` by angles given for each pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rebuilt_attention(attend, backend, module, query, key, value, attention_mask, **kwargs):
    """What ``attend``, the function of ``backend``, makes of keys and values in full."""
    key, value = module.rebuilt(key, value)
    attend = super(AbsorbedAttention, module).fitting(attend, backend, query, value, attention_mask)
    return attend(module, query, key, value, attention_mask, **kwargs)
