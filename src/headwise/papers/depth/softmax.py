"""Conditioning of real softmax heads at random initialisation, and of the attention's Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

TOKENS, WIDTH, HEAD_DIM = 197, 768, 64
SMALL_TOKENS, SMALL_WIDTH, SMALL_DIM = 8, 16, 4
LEVEL = 1.05  # no more than that counts as equal
SPREADS = {"0.02": 0.02, "1/sqrt(D)": WIDTH**-0.5}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to condition (outputs at one spread of weights, or the Jacobian), heads, and what stays the same."""

    of: str
    heads: int
    kept: str
    seed: int = 0

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """1 to 48 heads at the sizes of ViT-B; Jacobians at 8 tokens of 16; quick: fewer head counts."""
        quick = size == "quick"
        count = seeds or (1 if quick else 3)
        heads = (1, 8, 12, 16) if quick else (1, 2, 4, 8, 12, 16, 24, 48)
        cells = [(spread, h, kept) for spread in SPREADS for kept in ("width", "head_dim") for h in heads]
        cells += [("jacobian", h, "width") for h in (1, 2, 4, 8, 16)]
        cells += [("jacobian", h, "head_dim") for h in (4, 8, 16)]
        return [cls(*cell, seed) for cell in cells for seed in range(count)]


def run(settings: Settings) -> dict[str, Any]:
    """The condition number."""
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.of == "jacobian":
        dim = SMALL_WIDTH // settings.heads if settings.kept == "width" else SMALL_DIM
        return {"condition": _jacobian(settings.heads, dim, generator)}
    dim = WIDTH // settings.heads if settings.kept == "width" else HEAD_DIM
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weights = [_weights(WIDTH, settings.heads * dim, SPREADS[settings.of], generator) for _ in range(3)]
    s = torch.linalg.svdvals(_heads(x, weights, settings.heads))
    return {"condition": float(s[0] / s[-1])}


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Whether more heads condition better, at one width and at one head width."""
    curves = _curves(points)
    real = [curves[spread, kept] for spread in SPREADS for kept in ("width", "head_dim")]
    ends = sum(curve[max(curve)] < curve[1] for curve in real)
    steady = sum(_falls(curve) for curve in real)
    gains = [1 - curve[16] / curve[12] for curve in real]
    width, dims = curves["jacobian", "width"], curves["jacobian", "head_dim"]
    best = min(width, key=width.__getitem__)
    return [
        Verdict(
            "softmax-heads",
            HELD if steady == len(real) else CONDITIONAL if ends else FAILED,
            "; ".join(
                f"{spread}, {kept} kept: {_show(curves[spread, kept])}" for spread, kept in curves if spread in SPREADS
            ),
            f"most heads better than one in {ends} of {len(real)}, better all the way in {steady}; 12 -> 16 heads gain "
            f"{min(gains):.0%} to {max(gains):.0%}",
        ),
        Verdict(
            "jacobian",
            HELD if _falls(width) and _falls(dims) else CONDITIONAL if dims[16] < dims[4] or _falls(width) else FAILED,
            f"width kept: {_show(width)}; head width kept: {_show(dims)}",
            f"at one width best at {best} heads, {'' if _falls(width) else 'not '}better all the way; with the head "
            f"width kept 4 -> 16 heads change it by {dims[16] / dims[4] - 1:+.0%}",
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Condition number over heads."""
    curves = _curves(points)
    outputs = [_line(f"{of}, {kept} kept", curve) for (of, kept), curve in curves.items() if of in SPREADS]
    jacobians = [_line(f"{kept} kept", curve) for (of, kept), curve in curves.items() if of == "jacobian"]
    return [
        Chart("Softmax heads at initialisation", "heads", "condition number", tuple(outputs), True, True),
        Chart("Jacobian of attention, 8 tokens of 16", "heads", "condition number", tuple(jacobians), True, True),
    ]


def _falls(curve: dict[int, float]) -> bool:
    """Whether more heads are never worse."""
    values = [curve[heads] for heads in sorted(curve)]
    return all(b <= LEVEL * a for a, b in pairwise(values))


def _heads(x_TD: Tensor, qkv: Sequence[Tensor], heads: int) -> Tensor:
    """Outputs of all heads side by side."""
    q_HTK, k_HTK, v_HTV = ((x_TD @ w).unflatten(1, (heads, -1)).transpose(0, 1) for w in qkv)
    maps_HTT = (q_HTK @ k_HTK.mT / q_HTK.shape[-1] ** 0.5).softmax(-1)
    return (maps_HTT @ v_HTV).transpose(0, 1).flatten(1)


def _jacobian(heads: int, dim: int, generator: torch.Generator) -> float:
    """Condition number of the derivative of the projected output by the query, key and value weights."""
    x = torch.randn(SMALL_TOKENS, SMALL_WIDTH, generator=generator, dtype=torch.float64)
    inner, spread = heads * dim, SMALL_WIDTH**-0.5
    weights = tuple(_weights(SMALL_WIDTH, inner, spread, generator) for _ in range(3))
    out = _weights(inner, SMALL_WIDTH, spread, generator)

    def output(*qkv: Tensor) -> Tensor:
        return (_heads(x, qkv, heads) @ out).flatten()

    parts = torch.autograd.functional.jacobian(output, weights)
    s = torch.linalg.svdvals(torch.cat([part.flatten(1) for part in parts], dim=1))
    return float(s[0] / s[-1])


def _weights(rows: int, columns: int, spread: float, generator: torch.Generator) -> Tensor:
    return spread * torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _curves(points: Sequence[Point[Settings]]) -> dict[tuple[str, str], dict[int, float]]:
    conditions: dict[tuple[str, str], dict[int, list[float]]] = {}
    for settings, outcome in points:
        conditions.setdefault((settings.of, settings.kept), {}).setdefault(settings.heads, []).append(
            outcome["condition"]
        )
    return {key: {h: float(np.median(v)) for h, v in sorted(row.items())} for key, row in conditions.items()}


def _line(name: str, curve: dict[int, float]) -> Line:
    return Line(name, tuple(map(float, curve)), tuple(curve.values()))


def _show(curve: dict[int, float]) -> str:
    return ", ".join(f"{heads}: {value:.3g}" for heads, value in curve.items())
