"""Narrower queries and keys for the attention of a trained small model, by weights alone or by what it really sees."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.linalg.joint import joint_truncate
from headwise.linalg.spectra import moment_root, product_spectrum
from headwise.papers.kit.small import Attention, Small

Start = Literal["svd", "weighted"]


def with_constant(x_BTD: Tensor) -> Tensor:
    """Inputs with a last coordinate of 1, which makes biases part of matrices."""
    return F.pad(x_BTD, (0, 1), value=1.0)


def factors(attention: Attention) -> tuple[Tensor, Tensor]:
    """Queries' and keys' matrices of each head with biases as last row, (H, D + 1, K)."""
    H = attention.sizes.heads
    factors = [
        torch.cat([p.weight.T, p.bias[None]]).unflatten(1, (H, -1)).transpose(0, 1) for p in (attention.q, attention.k)
    ]
    return factors[0].detach(), factors[1].detach()


def cut(attention: Attention, x_BTD: Tensor, rank: int, start: Start) -> tuple[Tensor, Tensor]:
    """Factors of every head's query-key product cut to ``rank``: by SVD of the weights, or weighted by inputs."""
    left, right = factors(attention)
    if start == "svd":
        return joint_truncate(left, right, rank)
    seen = with_constant(x_BTD).flatten(0, 1).double()
    root, inverse = moment_root(seen.T @ seen / len(seen))
    cut_left, cut_right = joint_truncate(root @ left.double(), root @ right.double(), rank)
    return (inverse @ cut_left).to(left.dtype), (inverse @ cut_right).to(right.dtype)


def energies(attention: Attention, x_BTD: Tensor) -> Tensor:
    """Singular values of each head's logits over the inputs, (H, K)."""
    left, right = factors(attention)
    seen = with_constant(x_BTD).flatten(0, 1).double()
    root, _ = moment_root(seen.T @ seen / len(seen))
    return product_spectrum(root @ left.double(), root @ right.double())


def narrowed(model: Small, inputs: Tensor, ranks: Sequence[int], start: Start) -> Small:
    """A copy whose layers have queries and keys of ``ranks``, layer after layer on the inputs of the original."""
    reduced = copy.deepcopy(model)
    with torch.no_grad():
        seen = model.attention_inputs(inputs)
    for attention, x_BTD, rank in zip(reduced.attentions(), seen, ranks, strict=True):
        left, right = cut(attention, x_BTD, rank, start)
        attention.q, attention.k = _linear(left), _linear(right)
    return reduced


def _linear(factor_HDr: Tensor) -> nn.Linear:
    """Projections whose last row is a bias; the scale of the attention stays that of the original width."""
    stacked = factor_HDr.transpose(0, 1).flatten(1)
    layer = nn.Linear(stacked.shape[0] - 1, stacked.shape[1])
    with torch.no_grad():
        layer.weight.copy_(stacked[:-1].T)
        layer.bias.copy_(stacked[-1])
    return layer
