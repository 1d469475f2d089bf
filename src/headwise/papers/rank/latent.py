"""Latent attention as in DeepSeek-V3: rank and loss of a small trained model by the width of its latent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from headwise.linalg.ranks import gram_singular_values, hard_rank, numerical_rank
from headwise.papers.kit.data import SYMBOLS
from headwise.papers.kit.language import Reading, held_out, teach, validation_loss
from headwise.papers.kit.point import Point
from headwise.papers.kit.training import seeded
from headwise.records.papers import CONDITIONAL, FAILED, HELD, OPEN, Chart, Line, Verdict

WIDTH, LAYERS, HEADS, ROTARY = 64, 2, 4, 8
RANDOM_TOKENS, RANDOM_WIDTH, RANDOM_REPEATS = 100, 256, 40
RELATIVE = 1e-2
NOISE = 0.01
FITS, FEWEST = 0.7, 3
DIMS = (2, 4, 8, 16, 32, 64)
PLAIN = 0  # no latent


@dataclass(frozen=True, slots=True)
class Settings:
    """Width of the key/value latent and of a head's queries and keys (without rotary part)."""

    latent: int
    head_dim: int
    seed: int = 0
    length: int = 96
    steps: int = 800

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """Latents 2 to 64 with heads of 4 and 16; quick: two latents, briefly."""
        if size == "quick":
            return [cls(latent, 16, seed, 48, 40) for latent in (2, 32) for seed in range(seeds or 1)]
        cells = [(latent, dim) for dim in (4, 16) for latent in (2, 4, 8, 16, 32, 64)]
        return [cls(*cell, seed) for cell in cells for seed in range(seeds or 2)]


def run(settings: Settings) -> dict[str, Any]:
    """Ranks with random weights (no positions), then loss and ranks of a model trained on text."""
    model = seeded(settings.seed, lambda: Watched(settings))
    before = _ranks(model, settings.length)
    reading = Reading(settings.length, 1536 // settings.length, settings.steps)
    teach(model, reading, settings.seed)
    return {
        "random": _random_rank(settings, settings.head_dim),
        "by_dim": [_random_rank(settings, dim) for dim in DIMS],
        "plain": [_random_rank(replace(settings, latent=PLAIN), dim) for dim in DIMS],
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
    """Whether the rank stops following the head width, as without a latent, and the loss of trained models the rank."""
    table = _table(points)
    by_dim = {settings.latent: outcome["by_dim"] for settings, outcome in points if settings.seed == 0}
    plain = points[0].outcome["plain"]
    flat = {c: 1 - ranks[-2] / ranks[-1] for c, ranks in sorted(by_dim.items())}
    without = 1 - plain[-2] / plain[-1]
    level = sum(gain < without + NOISE for gain in flat.values())
    latents = sorted(by_dim)
    random = Verdict(
        "latent-random",
        HELD if level == len(flat) else CONDITIONAL if level else FAILED,
        f"random weights, heads of {'/'.join(map(str, DIMS))}: rank over n "
        + "; ".join(f"latent {c}: {_list(by_dim[c])}" for c in latents)
        + f"; no latent: {_list(plain)}",
        f"the last doubling of the head width adds no more than without a latent ({without:.1%}) in {level} of "
        f"{len(flat)} latents",
    )
    if len(latents) < FEWEST:
        return [random, Verdict("latent-trained", OPEN, "in full only")]
    fits = [_correlation(rows) for rows in table.values()]
    losses = "; ".join(
        f"heads of {d}: loss {_list([rows[c]['loss'] for c in sorted(rows)])}" for d, rows in table.items()
    )
    ranks = "; ".join(f"heads of {d}: {_list([rows[c]['after'] for c in sorted(rows)])}" for d, rows in table.items())
    trained = Verdict(
        "latent-trained",
        HELD if min(fits) > FITS else CONDITIONAL if max(fits) > FITS else FAILED,
        f"trained, latent {'/'.join(map(str, latents))}: {losses}",
        f"hard rank over n after training {ranks}; correlation of rank with -loss {_list(fits)}; values "
        "come through the latent too, so the loss may follow it for that reason",
    )
    return [random, trained]


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


def _random_rank(settings: Settings, d: int) -> float:
    """Hard rank over n of orthonormal inputs under Gaussian weights, keys through the latent if there is one."""
    generator = torch.Generator().manual_seed(settings.seed)
    R, n, c = RANDOM_REPEATS, RANDOM_TOKENS, settings.latent
    q = torch.randn(R, n, d, generator=generator)
    k = torch.randn(R, n, c or d, generator=generator)
    k = k @ torch.randn(R, c, d, generator=generator) if c else k
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
    for settings, outcome in points:
        cell = (outcome["random"], outcome["after"]["hard"], outcome["loss"])
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
