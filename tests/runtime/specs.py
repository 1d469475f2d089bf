"""Codes for tiny models, drawn at random: nothing is claimed about their quality."""

from __future__ import annotations

import torch

from headwise.runtime.packing import WIDTHS, CacheSpec, LayerCodes


def random_codes(heads: int, key_width: int, value_width: int, bits: int | None = None, seed: int = 0) -> LayerCodes:
    generator = torch.Generator().manual_seed(seed)

    def widths(count: int) -> torch.Tensor:
        if bits is not None:
            return torch.full((heads, count), bits, dtype=torch.uint8)
        return torch.tensor(WIDTHS, dtype=torch.uint8)[torch.randint(0, 8, (heads, count), generator=generator)]

    def levels(count: int) -> torch.Tensor:
        offset, scale, cubic = torch.rand(3, heads, count, generator=generator)
        return torch.stack((offset - 0.5, 2 + scale, cubic * 0.6 - 0.2), dim=-1).half()

    def gain() -> torch.Tensor:
        return 1 + 0.1 * torch.rand(9, generator=generator).half()

    def loudness() -> torch.Tensor:
        return torch.tensor([0.7, 0.05, 3.0]).half() + 0.01 * torch.rand(3, generator=generator).half()

    levels_of_both = levels(key_width), levels(value_width)
    return LayerCodes(widths(key_width), widths(value_width), *levels_of_both, gain(), gain(), loudness(), loudness())


def random_spec(
    layers: int = 3,
    heads: int = 2,
    key_width: int = 8,
    value_width: int = 8,
    rotary: int = 8,
    bits: int | None = None,
    whole: int = 1,
    **more: object,
) -> CacheSpec:
    codes = {i: random_codes(heads, key_width, value_width, bits, seed=i) for i in range(layers)}
    return CacheSpec(codes, whole, rotary, fingerprint="ab" * 32, **more)
