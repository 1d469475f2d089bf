"""Ranks, saturation and entropy of attention maps by length, summed batch by batch. No map outlives its call."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.linalg.attention import Attention
from headwise.linalg.ranks import effective_rank, gram_singular_values, hard_rank, numerical_rank, stable_rank
from headwise.linalg.saturation import jacobian_norms
from headwise.linalg.sums import Sums

TOLERANCES = (1e-1, 1e-2, 1e-3)
MAP_NUMBERS = 1 << 22  # numbers of attention maps held at once
OVERLAP_ROWS = 64
LONGEST_SPECTRUM = 2048
SINGULAR = 1e-8


def at(name: str, length: int) -> str:
    """The name of a quantity at one length in `Sums`."""
    return f"{name}@{length}"


def add_maps(sums: Sums, attention: Attention, lengths: tuple[int, ...], *, spectra: bool) -> None:
    """Add ranks, saturation, entropy and first-token share of every head of ``attention`` at ``lengths``.

    Under a causal mask the leading L x L block of a map is the map of the first L tokens, so one pass serves all
    lengths; saturation, entropy and spread are then taken over the rows that see more than L/2 and at most L keys.
    Without a mask ``lengths`` holds the one length there is, and all rows count.
    """
    T, S = attention.q_BHTK.shape[2], attention.k_BGSK.shape[2]
    B, H = attention.q_BHTK.shape[:2]
    at_once = max(1, MAP_NUMBERS // (B * T * S))
    collected: dict[str, list[Tensor]] = {}
    for start in range(0, H, at_once):
        heads = slice(start, start + at_once)
        for name, value in _measure(attention, heads, lengths, spectra).items():
            collected.setdefault(name, []).append(value)
    for name, values in collected.items():
        sums.add(name, torch.cat(values), B)


def add_overlap(sums: Sums, attention: Attention) -> None:
    """Add, for each pair of heads, the share of attention that both put on the same keys: ``sum_j min(a_j, b_j)``.

    1 means equal rows; it is 1 minus their total variation. Rows are a spread sample of the later half.
    """
    B, H = attention.q_BHTK.shape[:2]
    rows = sample_rows(attention, OVERLAP_ROWS)
    a_BHTS = attention.logits(slice(None), rows).softmax(-1)
    overlap = torch.stack([torch.minimum(a_BHTS, a_BHTS[:, h : h + 1]).sum(-1).mean(-1) for h in range(H)], dim=-1)
    sums.add("overlap", overlap.sum(0), B)


def add_conditioning(sums: Sums, attention: Attention, lengths: tuple[int, ...]) -> None:
    """Add the logarithm of the condition number of the concatenated head outputs at each length."""
    out_BTD = attention.out_BTHV.flatten(2)
    for L in lengths:
        s = gram_singular_values(out_BTD[:, :L] if attention.causal else out_BTD)
        worst = s[:, 0] / s[:, -1].clamp(min=SINGULAR * s[:, 0]).clamp(min=torch.finfo(torch.float64).tiny)
        sums.add(at("conditioning", L), worst.log().sum(), len(worst))


def sample_rows(attention: Attention, count: int) -> Tensor:
    """At most ``count`` rows, evenly spread; of a causal map only of its later half, where there is much to look at."""
    T = attention.q_BHTK.shape[2]
    first = T // 2 if attention.causal else 0
    count = min(count, T - first)
    return torch.linspace(first, T - 1, count, device=attention.q_BHTK.device).round().long()


def _measure(attention: Attention, heads: slice, lengths: tuple[int, ...], spectra: bool) -> dict[str, Tensor]:
    """Every quantity of these heads at each length, summed over the batch."""
    logits_BHTS = attention.logits(heads, slice(None))
    a_BHTS = logits_BHTS.softmax(-1)
    totals: dict[str, Tensor] = {}
    winners_BHT = a_BHTS.argmax(dim=-1)
    for L in lengths:

        def keep(name: str, value_BH: Tensor, length: int = L) -> None:
            totals[at(name, length)] = value_BH.double().sum(0)

        rows = slice(L // 2, L) if attention.causal else slice(None)
        columns = slice(0, L) if attention.causal else slice(None)
        block, seen = a_BHTS[:, :, rows, columns], logits_BHTS[:, :, rows, columns]
        norms = jacobian_norms(block)
        keep("jacobian_mean", norms.mean(-1))
        keep("jacobian_p95", norms.quantile(0.95, dim=-1))
        keep("jacobian_bound", block.amax(-1).mean(-1))
        keep("logit_spread", _spread(seen).mean(-1))
        keep("entropy", torch.special.entr(block).sum(-1).mean(-1))
        keep("first_token", block[..., 0].mean(-1))
        keep("hard_rank", hard_rank(winners_BHT[..., :L] if attention.causal else winners_BHT, a_BHTS.shape[-1]))
        if spectra and max(block.shape[-2:]) <= LONGEST_SPECTRUM:
            leading = a_BHTS[:, :, :L, :L] if attention.causal else a_BHTS
            s = gram_singular_values(leading)
            keep("numerical_rank", torch.stack([numerical_rank(s, tolerance) for tolerance in TOLERANCES], dim=-1))
            keep("effective_rank", effective_rank(s))
            keep("stable_rank", stable_rank(s))
    return totals


def _spread(logits: Tensor) -> Tensor:
    """Standard deviation of the logits each row can see."""
    visible = logits > -torch.inf
    count = visible.sum(-1)
    values = logits.masked_fill(~visible, 0.0)
    mean = values.sum(-1) / count
    square = values.square().sum(-1) / count
    return (square - mean.square()).clamp(min=0).sqrt()
