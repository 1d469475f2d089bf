"""A small Transformer whose layers may differ in heads and widths: what most experiments train."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = Literal["learned", "sinusoidal", "alibi", "relative", "none"]
STEEPEST = 8.0
POSITION = 0.3  # size of learned positions at the start
BIAS_SCALE = 10.0  # learned position biases must be able to become sharp within a short training


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one layer; ``agents`` limits the rank of its maps by sending them through so many agents."""

    heads: int
    qk_dim: int
    v_dim: int
    agents: int = 0

    @classmethod
    def square(cls, heads: int, width: int) -> Heads:
        """``width`` shared evenly among heads."""
        return cls(heads, width // heads, width // heads)


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of attention and MLP (none if 0) on a residual stream; without ``norm`` there are no layer norms."""

    width: int
    layers: tuple[Heads, ...]
    mlp: int
    tokens: int
    causal: bool
    positions: Positions = "learned"
    norm: bool = True
    qk_norm: bool = False
    dropout: float = 0.0


class Attention(nn.Module):
    """Softmax attention; `weights` gives its maps alone."""

    def __init__(self, shape: Shape, sizes: Heads) -> None:
        super().__init__()
        self.sizes, self.causal, self.qk_norm = sizes, shape.causal, shape.qk_norm
        H, K, V, D = sizes.heads, sizes.qk_dim, sizes.v_dim, shape.width
        self.q, self.k = nn.Linear(D, H * K), nn.Linear(D, H * K)
        self.v, self.o = nn.Linear(D, H * V), nn.Linear(H * V, D)
        self.scale = 1 / math.sqrt(K)
        self.fused = not sizes.agents and shape.positions not in {"relative", "alibi"}
        self.dropout = nn.Dropout(shape.dropout)
        if shape.positions == "relative":
            self.bias = nn.Parameter(torch.zeros(H, 2 * shape.tokens - 1))
        if sizes.agents:
            self.agents = nn.Parameter(torch.randn(H, sizes.agents, K))
        steps = torch.arange(shape.tokens)
        self.register_buffer("distance", steps[:, None] - steps, persistent=False)
        slopes = 2.0 ** (-STEEPEST * (torch.arange(H) + 1) / H)
        self.register_buffer("slopes", slopes[:, None, None] if shape.positions == "alibi" else None, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Sums of values, projected."""
        return self.o(self.heads(x_BTD))

    def heads(self, x_BTD: Tensor) -> Tensor:
        """Sums of values of all heads side by side (B, T, H V)."""
        v_BHTV = self._split(self.v(x_BTD))
        if self.fused and not (self.training and self.dropout.p):
            q_BHTK, k_BHTK = self.queries_and_keys(x_BTD)
            out_BHTV = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTV, is_causal=self.causal, scale=self.scale)
        else:
            out_BHTV = self.dropout(self.weights(x_BTD)) @ v_BHTV
        return out_BHTV.transpose(1, 2).flatten(2)

    def weights(self, x_BTD: Tensor) -> Tensor:
        """Attention maps (B, H, T, T)."""
        q_BHTK, k_BHTK = self.queries_and_keys(x_BTD)
        if self.sizes.agents:
            to_agents = (q_BHTK @ self.agents.mT * self.scale).softmax(-1)
            return to_agents @ (self.agents @ k_BHTK.mT * self.scale).softmax(-1)
        return self.logits(q_BHTK, k_BHTK).softmax(-1)

    def logits(self, q_BHTK: Tensor, k_BHTK: Tensor) -> Tensor:
        """What goes into the softmax: scaled products, position bias and mask."""
        T = q_BHTK.shape[2]
        distance_TT = self.distance[:T, :T]
        logits_BHTT = q_BHTK @ k_BHTK.mT * self.scale
        if hasattr(self, "bias"):
            logits_BHTT = logits_BHTT + BIAS_SCALE * self.bias[:, distance_TT + self.bias.shape[1] // 2]
        if self.slopes is not None:
            logits_BHTT = logits_BHTT - self.slopes * distance_TT.abs()
        return logits_BHTT.masked_fill(distance_TT < 0, -torch.inf) if self.causal else logits_BHTT

    def queries_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, T, K)."""
        q_BHTK, k_BHTK = self._split(self.q(x_BTD)), self._split(self.k(x_BTD))
        if self.qk_norm:  # each number of unit size on average, so that no logit exceeds sqrt(K)
            q_BHTK, k_BHTK = (F.rms_norm(x, x.shape[-1:]) for x in (q_BHTK, k_BHTK))
        return q_BHTK, k_BHTK

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.sizes.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then an MLP if there is one, each added to the stream."""

    def __init__(self, shape: Shape, sizes: Heads) -> None:
        super().__init__()
        D = shape.width
        self.before_attention = nn.LayerNorm(D) if shape.norm else nn.Identity()
        self.attention = Attention(shape, sizes)
        self.dropout = nn.Dropout(shape.dropout)
        self.mlp = None
        if shape.mlp:
            before = nn.LayerNorm(D) if shape.norm else nn.Identity()
            self.mlp = nn.Sequential(before, nn.Linear(D, shape.mlp), nn.GELU(), nn.Linear(shape.mlp, D))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The stream after this block."""
        x_BTD = x_BTD + self.dropout(self.attention(self.before_attention(x_BTD)))
        return x_BTD if self.mlp is None else x_BTD + self.dropout(self.mlp(x_BTD))


class Small(nn.Module):
    """``reads`` turns inputs into vectors, blocks follow, ``writes`` turns the stream into outputs."""

    def __init__(self, shape: Shape, reads: nn.Module, outputs: int) -> None:
        super().__init__()
        self.shape, self.reads = shape, reads
        self.positions = self._positions(shape)
        self.blocks = nn.ModuleList(Block(shape, sizes) for sizes in shape.layers)
        self.norm = nn.LayerNorm(shape.width) if shape.norm else nn.Identity()
        self.writes = nn.Linear(shape.width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs for every token."""
        return self.writes(self.norm(self.stream(inputs)))

    def stream(self, inputs: Tensor) -> Tensor:
        """The residual stream after all blocks."""
        x_BTD = self._enter(inputs)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def attention_inputs(self, inputs: Tensor) -> list[Tensor]:
        """The inputs of the attention of each layer."""
        x_BTD, entering = self._enter(inputs), []
        for block in self._blocks():
            entering.append(block.before_attention(x_BTD))
            x_BTD = block(x_BTD)
        return entering

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [block.attention for block in self._blocks()]

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def _enter(self, inputs: Tensor) -> Tensor:
        x_BTD = self.reads(inputs)
        return x_BTD if self.positions is None else x_BTD + self.positions[: x_BTD.shape[1]]

    @staticmethod
    def _positions(shape: Shape) -> nn.Parameter | None:
        if shape.positions == "learned":
            return nn.Parameter(POSITION * torch.randn(shape.tokens, shape.width))
        if shape.positions == "sinusoidal":
            return nn.Parameter(_sinusoids(shape.tokens, shape.width), requires_grad=False)
        return None


class Classifier(nn.Module):
    """One answer for a whole input: the mean of the stream, then a linear layer."""

    def __init__(self, shape: Shape, reads: nn.Module, labels: int) -> None:
        super().__init__()
        self.body = Small(shape, reads, labels)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the labels."""
        return self.body.writes(self.body.norm(self.body.stream(inputs)).mean(1))


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def uniform(layers: int, heads: int, qk_dim: int, v_dim: int) -> tuple[Heads, ...]:
    """The same attention in every layer."""
    return (Heads(heads, qk_dim, v_dim),) * layers


def _sinusoids(tokens: int, width: int) -> Tensor:
    angles = torch.arange(tokens)[:, None] * torch.exp(-math.log(10000.0) * torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
