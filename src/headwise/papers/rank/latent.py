"""Latent attention as in DeepSeek-V3: rank and loss of a small trained model by the width of its latent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from headwise.linalg.ranks import gram_singular_values, hard_rank, numerical_rank
from headwise.papers.data import SYMBOLS
from headwise.papers.language import Reading, held_out, teach, validation_loss
from headwise.papers.point import Point
from headwise.papers.training import seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

WIDTH, LAYERS, HEADS, ROTARY = 64, 2, 4, 8
RANDOM_TOKENS, RANDOM_WIDTH, RANDOM_REPEATS = 100, 256, 40
RELATIVE = 1e-2
NEAR = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """Width of the key/value latent and of a head's queries and keys (without rotary part)."""

    latent: int
    head_dim: int
    seed: int = 0
    length: int = 96
    steps: int = 1000

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Latents 2 to 64 with heads of 4 and 16; quick: two latents, briefly."""
        if size == "quick":
            return [cls(latent, 16, 0, 48, 40) for latent in (2, 32)]
        cells = [(latent, dim) for dim in (4, 16) for latent in (2, 4, 8, 16, 32, 64)]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Ranks with random weights (no positions), then loss and ranks of a model trained on text."""
    model = seeded(settings.seed, lambda: Watched(settings))
    before = _ranks(model, settings.length)
    reading = Reading(settings.length, 1536 // settings.length, settings.steps)
    teach(model, reading, settings.seed)
    return {
        "random": _random_rank(settings),
        "before": before,
        "after": _ranks(model, settings.length),
        "loss": validation_loss(model, settings.length),
    }


class Watched(nn.Module):
    """A small dense DeepSeek-V3 that answers with logits alone."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        config = DeepseekV3Config(
            vocab_size=SYMBOLS,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=None,
            kv_lora_rank=settings.latent,
            qk_nope_head_dim=settings.head_dim,
            qk_rope_head_dim=ROTARY,
            v_head_dim=16,
            first_k_dense_replace=LAYERS,
            max_position_embeddings=settings.length,
            use_cache=False,
        )
        self.inner = AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def forward(self, codes_BT: Tensor) -> Tensor:
        """Logits of the next characters."""
        return self.inner(codes_BT).logits

    @torch.no_grad()
    def maps(self, codes_BT: Tensor) -> list[Tensor]:
        """Attention maps of each layer."""
        return list(self.inner(codes_BT, output_attentions=True).attentions)


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Where rank and loss stop following the latent."""
    table = _table(points)
    shown, plateau = [], []
    for dim, rows in table.items():
        latents = sorted(rows)
        ranks = [rows[c]["random"] for c in latents]
        plateau.append(next(c for c, rank in zip(latents, ranks) if rank > max(ranks) - NEAR))
        shown.append(f"heads of {dim}: {_list(ranks)}")
    first = next(iter(table.values()))
    latents = sorted(first)
    lines = "; ".join(
        f"heads of {dim}: loss {_list([rows[c]['loss'] for c in latents])}" for dim, rows in table.items()
    )
    ranks = "; ".join(f"heads of {dim}: {_list([rows[c]['after'] for c in latents])}" for dim, rows in table.items())
    fits = [_correlation(rows) for rows in table.values()]
    return [
        Verdict(
            "latent-random",
            HELD if all(c <= 4 * dim for c, dim in zip(plateau, table)) else CONDITIONAL,
            f"random weights, latent {'/'.join(map(str, latents))}: rank over n {'; '.join(shown)}",
            f"the latent is enough from {', '.join(map(str, plateau))} on: of the order of the head width",
        ),
        Verdict(
            "latent-trained",
            HELD if min(fits) > 0.7 else CONDITIONAL if max(fits) > 0 else FAILED,  # noqa: PLR2004
            f"trained, latent {'/'.join(map(str, latents))}: {lines}",
            f"hard rank over n after training {ranks}; correlation of rank with -loss {_list(fits)}",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Ranks and loss over the latent."""
    table = _table(points)
    ranks, losses = [], []
    for dim, rows in table.items():
        x = tuple(map(float, sorted(rows)))
        ranks += [
            Line(f"{name}, heads of {dim}", x, tuple(rows[c][key] for c in sorted(rows)))
            for key, name in (("random", "random"), ("after", "trained"))
        ]
        losses.append(Line(f"heads of {dim}", x, tuple(rows[c]["loss"] for c in sorted(rows))))
    return [
        Chart("Latent attention: hard rank over n", "latent width", "rank / n", tuple(ranks), True),
        Chart("Latent attention: loss", "latent width", "nats per character", tuple(losses), True),
    ]


def _random_rank(settings: Settings) -> float:
    """Hard rank over n of orthonormal inputs under Gaussian weights, keys through the latent."""
    generator = torch.Generator().manual_seed(settings.seed)
    R, n, d, c = RANDOM_REPEATS, RANDOM_TOKENS, settings.head_dim, settings.latent
    q = torch.randn(R, n, d, generator=generator)
    k = torch.randn(R, n, c, generator=generator) @ torch.randn(R, c, d, generator=generator)
    return float(hard_rank((q @ k.mT).argmax(-1), n).double().mean() / n)


def _ranks(model: Watched, length: int) -> dict[str, float]:
    """Mean ranks over n of the first layer's maps on held-out text."""
    maps_BHTT = model.maps(held_out(length, 8)[0])[0]
    n = maps_BHTT.shape[-1]
    hard = hard_rank(maps_BHTT.argmax(-1), n).double().mean() / n
    numerical = numerical_rank(gram_singular_values(maps_BHTT), RELATIVE).double().mean() / n
    return {"hard": float(hard), "numerical": float(numerical)}


def _table(points: Sequence[Point[Settings]]) -> dict[int, dict[int, dict[str, float]]]:
    rows: dict[int, dict[int, list[tuple[float, float, float]]]] = {}
    for settings, found in points:
        cell = (found["random"], found["after"]["hard"], found["loss"])
        rows.setdefault(settings.head_dim, {}).setdefault(settings.latent, []).append(cell)
    names = ("random", "after", "loss")
    return {
        dim: {c: dict(zip(names, np.mean(cells, axis=0).tolist())) for c, cells in by_latent.items()}
        for dim, by_latent in rows.items()
    }


def _correlation(rows: dict[int, dict[str, float]]) -> float:
    x, y = [row["after"] for row in rows.values()], [-row["loss"] for row in rows.values()]
    return float(np.corrcoef(x, y)[0, 1]) if np.std(x) > 0 else 0.0


def _list(values: Sequence[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
