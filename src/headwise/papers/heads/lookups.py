"""The model of paper `heads` on its synthetic task, many seeds at once, with the query of the class token folded in.

Only the class token asks, so a head's query and key matrices meet the tokens as one vector, the token encoder's last
layer can be applied after the tokens are averaged, and a token costs two small products. This is exact: parameters,
outputs and gradients are those of the model as the paper writes it.

Letters: M models (seeds)   B texts   T tokens   N hidden neurons   E = H n encoded width   H heads   n head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TOKEN_DIM = 4
TRAIN, VALIDATION, BATCH, WARM_UP = 8000, 2000, 125, 200
TASK_SEED = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One or two attention layers of ``heads`` times ``head_dim``; ``hidden`` neurons before and after them."""

    heads: int
    head_dim: int
    hidden: int = 32
    layers: int = 1

    @property
    def width(self) -> int:
        """E."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Task:
    """Texts and their standardised answers, the sum of ``look_ups`` maxima along as many directions."""

    x_BTd: Tensor
    y_B: Tensor

    @classmethod
    def draw(cls, look_ups: int, tokens: int, *, orthonormal: bool = True) -> Task:
        """The same 10,000 texts every time; the last 2,000 are for validation. The paper does not tell directions."""
        generator = torch.Generator().manual_seed(TASK_SEED)
        drawn = torch.randn(TOKEN_DIM, TOKEN_DIM, generator=generator)
        directions = (torch.linalg.qr(drawn)[0] if orthonormal else F.normalize(drawn))[:look_ups]
        x_BTd = torch.randn(TRAIN + VALIDATION, tokens, TOKEN_DIM, generator=generator)
        y_B = (x_BTd @ directions.T).amax(1).sum(-1)
        return cls(x_BTd, (y_B - y_B[:TRAIN].mean()) / y_B[:TRAIN].std())


class LookUpModels:
    """``seeds`` models of one shape, each with its own start; called on B texts they give M x B answers."""

    def __init__(self, shape: Shape, seeds: int, tokens_dim: int = TOKEN_DIM) -> None:
        self.shape, self.seeds = shape, seeds
        H, n, E, N = shape.heads, shape.head_dim, shape.width, shape.hidden
        sizes = {"w_in": (tokens_dim, N), "b_in": (1, N), "w_code": (N, E), "b_code": (1, E), "class": (E, 1)}
        for layer in range(shape.layers):
            sizes |= {f"{name}{layer}": (E, H * n) for name in ("q", "k", "v")} | {f"o{layer}": (H * n, E)}
        sizes |= {"w_out": (E, N), "b_out": (1, N), "w_end": (N, 1), "b_end": (1, 1)}
        fans = {"b_in": tokens_dim, "b_code": N, "class": 1, "b_out": E, "b_end": N}
        self.weights = {
            name: torch.stack([_start(size, fans.get(name, size[0]), seed, index) for seed in range(seeds)])
            for index, (name, size) in enumerate(sizes.items())
        }
        for weight in self.weights.values():
            weight.requires_grad_()

    def __call__(self, x_BTd: Tensor) -> Tensor:
        """Answers, M x B."""
        w = self.weights
        c_MBE = w["class"].mT.expand(-1, len(x_BTd), -1)
        r_MBTN = self._hidden(x_BTd)
        if self.shape.layers == 1:
            c_MBE = c_MBE + self._first(r_MBTN)
        else:
            e_MBTE = r_MBTN @ w["w_code"][:, None] + w["b_code"][:, None]
            c_MBE = c_MBE + self._ask(0, c_MBE, e_MBTE)
            c_MBE = c_MBE + self._ask(1, c_MBE, e_MBTE + self._among_tokens(e_MBTE))
        z_MBN = F.gelu(c_MBE @ w["w_out"] + w["b_out"])
        return (z_MBN @ w["w_end"] + w["b_end"])[..., 0]

    def _hidden(self, x_BTd: Tensor) -> Tensor:
        B, T, _ = x_BTd.shape
        with_one = F.pad(x_BTd, (0, 1), value=1.0).flatten(0, 1)
        weights = torch.cat([self.weights["w_in"], self.weights["b_in"]], dim=1)
        return (with_one @ weights).relu().view(self.seeds, B, T, -1)

    def _first(self, r_MBTN: Tensor) -> Tensor:
        """The class token's attention in the first layer, from the encoder's hidden neurons."""
        w, H = self.weights, self.shape.heads
        q_MHn = (w["class"].mT @ w["q0"]).unflatten(-1, (H, -1))[:, 0]
        k_MEH = torch.einsum("mehn,mhn->meh", w["k0"].unflatten(-1, (H, -1)), q_MHn) / math.sqrt(self.shape.head_dim)
        logits_MBTH = (r_MBTN.flatten(1, 2) @ (w["w_code"] @ k_MEH)).unflatten(1, r_MBTN.shape[1:3])
        pooled_MBHN = logits_MBTH.mT.contiguous().softmax(-1) @ r_MBTN
        return self._values(0, pooled_MBHN @ w["w_code"][:, None] + w["b_code"][:, None])

    def _ask(self, layer: int, c_MBE: Tensor, e_MBTE: Tensor) -> Tensor:
        """The class token's attention where it differs from text to text."""
        w, H = self.weights, self.shape.heads
        q_MBHn = (c_MBE @ w[f"q{layer}"]).unflatten(-1, (H, -1))
        k_MEHn = w[f"k{layer}"].unflatten(-1, (H, -1))
        asked_MBHE = torch.einsum("mbhn,mehn->mbhe", q_MBHn, k_MEHn) / math.sqrt(self.shape.head_dim)
        return self._values(layer, (asked_MBHE @ e_MBTE.mT).softmax(-1) @ e_MBTE)

    def _values(self, layer: int, pooled_MBHE: Tensor) -> Tensor:
        v_MEHn = self.weights[f"v{layer}"].unflatten(-1, (self.shape.heads, -1))
        heads_MBHn = torch.einsum("mbhe,mehn->mbhn", pooled_MBHE, v_MEHn)
        return heads_MBHn.flatten(2) @ self.weights[f"o{layer}"]

    def _among_tokens(self, e_MBTE: Tensor) -> Tensor:
        w, H = self.weights, self.shape.heads
        q, k, v = (
            (e_MBTE @ w[f"{name}0"][:, None]).unflatten(-1, (H, -1)).transpose(2, 3).flatten(0, 1)
            for name in ("q", "k", "v")
        )
        out = F.scaled_dot_product_attention(q, k, v).unflatten(0, e_MBTE.shape[:2])
        return out.transpose(2, 3).flatten(3) @ w["o0"][:, None]


def train(models: LookUpModels, task: Task, steps: int, rate: float) -> list[float]:
    """Validation NMSE of each model after ``steps`` of Adam with warm-up and a cosine to zero."""
    optimiser = torch.optim.Adam(models.weights.values(), lr=rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    generator = torch.Generator().manual_seed(TASK_SEED + 1)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(TRAIN, generator=generator)
        batch, order = order[:BATCH], order[BATCH:]
        loss = (models(task.x_BTd[batch]) - task.y_B[batch]).square().mean(1).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return _errors(models, task)


@torch.no_grad()
def _errors(models: LookUpModels, task: Task) -> list[float]:
    x_BTd, y_B = task.x_BTd[TRAIN:], task.y_B[TRAIN:]
    answers_MB = torch.cat([models(part) for part in x_BTd.split(BATCH)], dim=1)
    return ((answers_MB - y_B).square().mean(1) / y_B.var()).tolist()


def _start(size: tuple[int, int], fan: int, seed: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return (2 * torch.rand(size, generator=generator) - 1) / math.sqrt(fan)
