"""Codes for tiny models, drawn at random: nothing is claimed about their quality."""

from __future__ import annotations

import torch

from headwise.runtime.packing import WIDTHS, CacheSpec, LayerCodes, storable


def random_codes(
    heads: int,
    key_width: int,
    value_width: int,
    bits: int | None = None,
    seed: int = 0,
    groups: int | None = None,
    joint: bool = False,
) -> LayerCodes:
    generator, groups = torch.Generator().manual_seed(seed), groups or 1
    if joint:
        key_width, value_width = 0, key_width + value_width
    width = heads // groups * value_width

    def widths(*shape: int) -> torch.Tensor:
        if bits is not None:
            return torch.full(shape, bits, dtype=torch.uint8)
        return torch.tensor(WIDTHS, dtype=torch.uint8)[torch.randint(0, 8, shape, generator=generator)]

    def levels(*shape: int) -> torch.Tensor:
        offset, scale, cubic = torch.rand(3, *shape, generator=generator)
        return storable(torch.stack((offset - 0.5, 2 + scale, cubic * 0.6 - 0.2), dim=-1))

    def gain() -> torch.Tensor:
        return 1 + 0.1 * torch.rand(9, generator=generator).half()

    def loudness() -> torch.Tensor:
        return torch.tensor([0.7, 0.05, 3.0]).half() + 0.01 * torch.rand(3, generator=generator).half()

    mixed = torch.eye(width) + torch.randn(groups, width, width, generator=generator) / (3 * width**0.5)
    return LayerCodes(
        widths(heads, key_width),
        widths(groups, width),
        levels(heads, key_width),
        levels(groups, width),
        gain(),
        gain(),
        loudness(),
        loudness(),
        mixed.half(),
    )


def random_spec(
    layers: int = 3,
    heads: int = 2,
    key_width: int = 8,
    value_width: int = 8,
    rotary: int = 8,
    bits: int | None = None,
    whole: int = 1,
    groups: int | None = None,
    joint: bool = False,
    **more: object,
) -> CacheSpec:
    codes = {i: random_codes(heads, key_width, value_width, bits, i, groups, joint) for i in range(layers)}
    return CacheSpec(codes, whole, rotary, fingerprint="ab" * 32, **more)
