"""Parameter counts of the architectures that paper `depth` redesigns, exactly, beside the counts it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headwise.papers.kit.point import Point
from headwise.records.papers import CONDITIONAL, FAILED, HELD, Chart, Line, Verdict

MILLION = 1e6
AGREE = 0.012
SAVED = (0.29, 0.51)
CLASSES, PIXELS = 1000, 3


@dataclass(frozen=True, slots=True)
class Row:
    """A model before and after, in millions as the paper reports it, and counted."""

    name: str
    reported: tuple[float, float]
    counted: tuple[int, int]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """All rows at once."""

    classes: int = CLASSES

    @classmethod
    def grid(cls, size: str, seeds: int | None) -> list[Settings]:
        """One point: arithmetic."""
        return [cls()]


def run(settings: Settings) -> dict[str, Any]:
    """Counted parameters of each row as its shape was handed down, and of the readings that would fit."""
    rows = [
        Row("XCiT-L", (189.1, 103.8), (xcit(24, 768, 16), xcit(12, 768, 24)), "24 -> 12 layers, width kept"),
        Row("XCiT-M", (84.4, 59.0), (xcit(24, 512, 8), xcit(12, 512, 16)), "24 -> 12 layers, width kept"),
        Row("TNT-B", (65.4, 30.9), (tnt(12, 640, 2560), tnt(8, 640, 2560)), "12 -> 8 layers, MLP kept"),
        Row("DaViT-B", (88.0, 62.0), (davit(128, 9), davit(128, 5)), "width kept"),
        Row("DaViT-L", (196.8, 140.0), (davit(192, 9), davit(192, 5)), "width kept"),
        Row("Crammed BERT", (119.0, 84.0), (bert(16), bert(10)), "16 -> 10 layers, width kept"),
    ]
    other = {"XCiT-M with 16 layers": xcit(16, 512, 16), "TNT-B with its MLP halved": tnt(8, 640, 1280)}
    open_rows = {
        "ViT-B": [vit(12, 768, 3072), vit(7, 768, 1536)],
        "ViT-B, wider": [vit(12, 768, 3072), vit(7, 1024, 1536)],
        "ViT-L with 12 layers": [vit(24, 1024, 4096), vit(12, 1024, 2048)],
        "GPT-2 of TinyStories without embeddings": [gpt2(12), gpt2(4)],
    }
    return {
        "rows": [[row.name, list(row.reported), list(row.counted), row.note] for row in rows],
        "other": other,
        "open": open_rows,
    }


def check(points: Sequence[Point[Settings]]) -> list[Verdict]:
    """Which counts agree, what is saved, and what would fit where they do not."""
    outcome = points[0].outcome
    offs = {
        name: max(abs(count / MILLION / paper - 1) for count, paper in zip(counted, reported))
        for name, reported, counted, _ in outcome["rows"]
    }
    saved = [1 - after / before for _, (before, after), _, _ in outcome["rows"]]
    agree = sum(off < AGREE for off in offs.values())
    shown = "; ".join(
        f"{name} {counted[0] / MILLION:.2f} -> {counted[1] / MILLION:.2f} M ({note})"
        for name, _, counted, note in outcome["rows"]
    )
    fits = ", ".join(f"{name} {count / MILLION:.1f} M" for name, count in outcome["other"].items())
    lean = {name: 1 - after / before for name, (before, after) in outcome["open"].items()}
    return [
        Verdict(
            "counts",
            HELD if agree == len(offs) else CONDITIONAL if agree else FAILED,
            shown,
            f"{agree} of {len(offs)} within {AGREE:.1%} of the reported; what would fit: {fits}",
        ),
        Verdict(
            "savings",
            HELD if min(saved) >= SAVED[0] and max(saved) <= SAVED[1] else CONDITIONAL,
            f"{min(saved):.0%} to {max(saved):.0%} fewer parameters, by the reported counts",
            "not recovered, counted: " + ", ".join(f"{name} {share:.0%}" for name, share in lean.items()),
        ),
    ]


def draw(points: Sequence[Point[Settings]]) -> list[Chart]:
    """Counted against reported."""
    rows = points[0].outcome["rows"]
    x = tuple(float(index + 1) for index in range(len(rows)))
    lines = []
    for index, name in enumerate(("before", "lean")):
        lines.append(Line(name, x, tuple(counted[index] / MILLION for _, _, counted, _ in rows)))
        lines.append(Line(f"{name}, paper", x, tuple(reported[index] for _, reported, _, _ in rows), True))
    names = ", ".join(f"{index + 1} {row[0]}" for index, row in enumerate(rows))
    return [Chart("Parameters", names, "millions", tuple(lines))]


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Numbers in a linear layer."""
    return outputs * (inputs + bias)


def mlp(width: int, hidden: int) -> int:
    """Two linear layers."""
    return linear(width, hidden) + linear(hidden, width)


def attention(width: int, qkv_bias: bool = True) -> int:
    """Joint projection to queries, keys and values, and the one back."""
    return linear(width, 3 * width, qkv_bias) + linear(width, width)


def vit(layers: int, width: int, hidden: int, patch: int = 16, tokens: int = 197) -> int:
    """ViT with a class token and learned positions."""
    block = 2 * 2 * width + attention(width) + mlp(width, hidden)
    ends = linear(PIXELS * patch**2, width) + (tokens + 1) * width + 2 * width + linear(width, CLASSES)
    return layers * block + ends


def xcit(layers: int, width: int, heads: int) -> int:
    """XCiT with patches of 16: convolutions, cross-covariance attention with local interaction, two class layers."""
    patches = sum(_convolution(a, b) for a, b in ((PIXELS, width // 8), (width // 8, width // 4)))
    patches += sum(_convolution(a, b) for a, b in ((width // 4, width // 2), (width // 2, width)))
    positions = linear(64, width)
    depthwise = 2 * (9 * width + width) + 2 * width
    block = 3 * 2 * width + attention(width) + heads + depthwise + mlp(width, 4 * width) + 3 * width
    class_block = 2 * 2 * width + attention(width) + mlp(width, 4 * width) + 2 * width
    return patches + positions + layers * block + 2 * class_block + width + 2 * width + linear(width, CLASSES)


def tnt(layers: int, width: int, hidden: int, inner: int = 40, pixels: int = 16, tokens: int = 196) -> int:
    """TNT: an inner Transformer over 16 pixels of 40 in each block, an outer one over patches."""
    inside = 2 * 2 * inner + attention(inner, qkv_bias=False) + mlp(inner, 4 * inner)
    between = 2 * inner * pixels + linear(inner * pixels, width)
    outside = 2 * 2 * width + attention(width, qkv_bias=False) + mlp(width, hidden)
    first = linear(PIXELS * 7**2, inner) + inner * pixels
    joined = 2 * inner * pixels + linear(inner * pixels, width) + 2 * width
    ends = (tokens + 1) * width + width + 2 * width + linear(width, CLASSES)
    return first + joined + layers * (inside + between + outside) + ends


def davit(width: int, third: int) -> int:
    """DaViT: four stages of doubling width, each depth a spatial and a channel block."""
    depths, widths = (1, 1, third, 1), [width * 2**stage for stage in range(4)]
    total = linear(PIXELS * 7**2, width) + 2 * width
    for before, after in pairwise(widths):
        total += 2 * before + linear(4 * before, after)
    for depth, wide in zip(depths, widths):
        block = 2 * (9 * wide + wide) + 2 * 2 * wide + attention(wide) + mlp(wide, 4 * wide)
        total += 2 * depth * block
    return total + 2 * widths[-1] + linear(widths[-1], CLASSES)


def bert(layers: int, width: int = 768, hidden: int = 3072, vocabulary: int = 32768) -> int:
    """Crammed BERT: no biases, gated MLP whose gate and value share ``hidden``, one matrix for both vocabularies."""
    block = 4 * width**2 + width * hidden + hidden // 2 * width + 2 * 2 * width
    return layers * block + vocabulary * width + 2 * 2 * width


def gpt2(layers: int, width: int = 768, hidden: int = 3072) -> int:
    """Blocks of GPT-2 and the last norm."""
    return layers * (2 * 2 * width + attention(width) + mlp(width, hidden)) + 2 * width


def _convolution(inputs: int, outputs: int) -> int:
    """3 x 3 without bias, then a batch norm."""
    return 9 * inputs * outputs + 2 * outputs
