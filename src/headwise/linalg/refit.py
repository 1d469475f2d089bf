"""Weights fitted anew after a cut, in closed form: queries to the attention there was, outputs to the stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS = 10  # of conjugate gradients
Turn = Callable[[Tensor], Tensor]


def attention_pull(logits_BHRS: Tensor, keys_BGSK: Tensor) -> tuple[Tensor, Tensor]:
    """How rows ``softmax(logits)`` pull at queries that meet other ``keys``: (B, H, R, K, K) and (B, H, R, K).

    To second order, the KL divergence between the rows and those of queries ``q`` is ``q' curve q / 2 - q' pull``:
    the covariance of the keys under each row, and that of keys and logits. Constants added to a row cancel.
    """
    B, H, R, S = logits_BHRS.shape
    G, K = keys_BGSK.shape[1], keys_BGSK.shape[-1]
    rows = logits_BHRS.softmax(-1)
    felt = torch.where(rows > 0, logits_BHRS, 0.0)
    felt = rows * (felt - (rows * felt).sum(-1, keepdim=True))
    rows_BGNS, felt_BGNS = (t.reshape(B, G, -1, S) for t in (rows, felt))
    i, j = torch.triu_indices(K, K)
    mean = rows_BGNS @ keys_BGSK
    upper = rows_BGNS @ (keys_BGSK[..., i] * keys_BGSK[..., j]) - mean[..., i] * mean[..., j]
    curve = upper.new_empty(*mean.shape, K)
    curve[..., i, j] = upper
    curve[..., j, i] = upper
    return curve.view(B, H, R, K, K), (felt_BGNS @ keys_BGSK).view(B, H, R, K)


def fit_queries(
    curve_HNKK: Tensor, pull_HNK: Tensor, features_HNF: Tensor, turn: Turn, turn_back: Turn, penalty: float
) -> Tensor:
    """The maps (H, K, F) whose queries ``turn(features @ map.T)`` answer the pull best; ``turn``: rotary positions.

    Conjugate gradients for all heads at once: the normal equations would have (K F)^2 numbers. ``penalty`` shrinks the
    maps, each entry in proportion to what it weighs.
    """
    weight = curve_HNKK.diagonal(dim1=-2, dim2=-1).mean(1)[:, :, None] * features_HNF.square().sum(1)[:, None]
    weight = weight.clamp(min=torch.finfo(weight.dtype).tiny ** 0.5)

    def gather(x_HNK: Tensor) -> Tensor:
        return turn_back(x_HNK).mT @ features_HNF

    def curved(maps: Tensor) -> Tensor:
        queries = turn(features_HNF @ maps.mT)
        return gather((curve_HNKK @ queries[..., None])[..., 0]) + penalty * weight * maps

    rest = gather(pull_HNK)
    maps, step = torch.zeros_like(rest), torch.zeros_like(rest)
    before = torch.ones_like(rest[:, :1, :1])
    for _ in range(STEPS):
        ready = rest / weight
        now = (rest * ready).sum((1, 2), keepdim=True)
        step = ready + now / before * step
        moved = curved(step)
        length = now / (step * moved).sum((1, 2), keepdim=True).clamp(min=torch.finfo(now.dtype).tiny)
        maps, rest, before = maps + length * step, rest - length * moved, now.clamp(min=torch.finfo(now.dtype).tiny)
    return maps


def fit_temperature(curve_HNKK: Tensor, pull_HNK: Tensor, queries_HNK: Tensor) -> Tensor:
    """By how much of themselves the queries of each head must grow to answer the pull best, (H,)."""
    curved = (curve_HNKK @ queries_HNK[..., None])[..., 0]
    needed = (queries_HNK * curved).sum((1, 2))
    return (queries_HNK * pull_HNK).sum((1, 2)) / needed.clamp(min=torch.finfo(needed.dtype).tiny)


class OutputFit:
    """Weighted ridge regression of what is missing on what a layer's heads give, added up batch by batch."""

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None

    def add(self, heads_NC: Tensor, missing_ND: Tensor, weight_N: Tensor) -> None:
        """Add tokens: all heads' outputs, what is missing after their projection, and how much each token counts."""
        weighted = heads_NC * weight_N[:, None]
        gram, cross = (weighted.mT @ heads_NC).double(), (weighted.mT @ missing_ND).double()
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross

    def solve(self, penalty: float) -> Tensor:
        """The correction (C, D), shrunk in proportion to what each head coordinate weighs, whatever its scale."""
        assert self.gram is not None and self.cross is not None, "nothing was added"
        weight = self.gram.diagonal()
        tiny = torch.finfo(torch.float64).eps * weight.max().clamp(min=torch.finfo(torch.float64).tiny)
        root = weight.clamp(min=tiny).sqrt()
        scaled = self.gram / root / root[:, None] + penalty * torch.eye(len(root), dtype=root.dtype, device=root.device)
        return torch.linalg.solve(scaled, self.cross / root[:, None]) / root[:, None]
