"""What a cache may store today instead of numbers of 16 bits: keys and values in, what attention reads and bytes out.

Rounding functions take keys (after RoPE) or values of whole windows, (B, G, T, K), and are pure. Each window is rounded
on its own, its first token too. Bytes are exact: codes without gaps and every scale that a reader needs, 16 bits each.

Letters: B windows, G key/value heads, T tokens, K and V widths of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.families.shapes import shape_of

SEED = 0
GROUP = 64  # numbers that share a scale in KIVI and in transformers' QuantizedCache
HALF = torch.finfo(torch.float16)
FLOAT8 = torch.finfo(torch.float8_e4m3fn)


class Rounded(NamedTuple):
    """Numbers as they are read back, and what storing them takes."""

    x: Tensor
    nbytes: int


Rounding = Callable[[Tensor], Rounded]


def code_bytes(numbers: int, bits: int) -> int:
    """Bytes of that many codes, packed."""
    return math.ceil(numbers * bits / 8)


def as_bfloat16(x_BGTK: Tensor) -> Rounded:
    """The cache of a model in bfloat16: what shares are shares of."""
    return Rounded(x_BGTK.bfloat16().to(x_BGTK.dtype), 2 * x_BGTK.numel())


def as_float8(x_BGTK: Tensor) -> Rounded:
    """float8 (e4m3) with one scale a window (of 32 bits): transformers' Fp8QuantizedLayer."""
    scale = (x_BGTK.abs().amax((1, 2, 3), keepdim=True) / FLOAT8.max).clamp(min=torch.finfo(torch.float32).tiny)
    read = (x_BGTK / scale).to(torch.float8_e4m3fn).to(x_BGTK.dtype) * scale
    return Rounded(read, x_BGTK.numel() + 4 * scale.numel())


def affine(x: Tensor, bits: int, dim: int) -> Rounded:
    """2^bits evenly spaced levels from the least to the largest number along ``dim``: least and step are in float16."""
    least, largest = torch.aminmax(x, dim=dim, keepdim=True)
    least = least.half().to(x.dtype)
    step = ((largest - least) / (2**bits - 1)).clamp(min=HALF.tiny).half().to(x.dtype)
    codes = ((x - least) / step).round().clamp(0, 2**bits - 1)
    return Rounded(codes * step + least, code_bytes(x.numel(), bits) + 4 * step.numel())


def per_token(x_BGTK: Tensor, bits: int) -> Rounded:
    """One scale and least number for each token and head."""
    return affine(x_BGTK, bits, dim=-1)


def per_channel(x_BGTK: Tensor, bits: int) -> Rounded:
    """One scale and least number for each coordinate in 64 tokens: KIVI's keys. The window must be made of 64s."""
    rounded = affine(x_BGTK.unflatten(2, (-1, GROUP)), bits, dim=3)
    return Rounded(rounded.x.flatten(2, 3), rounded.nbytes)


def per_token_across_heads(x_BGTV: Tensor, bits: int) -> Rounded:
    """One scale and least number for 64 numbers (or nearly, where heads do not add up) of a token: KIVI's values."""
    heads, width = x_BGTV.shape[1], x_BGTV.shape[3]
    numbers = heads * width
    group = min((size for size in range(1, numbers + 1) if numbers % size == 0), key=lambda size: abs(size - GROUP))
    rounded = affine(x_BGTV.transpose(1, 2).flatten(2).unflatten(-1, (-1, group)), bits, dim=-1)
    return Rounded(rounded.x.flatten(2).unflatten(-1, (heads, width)).transpose(1, 2), rounded.nbytes)


@functools.cache
def rotation(width: int) -> Tensor:
    """A normalised Hadamard matrix; where ``width`` is no power of two, a random orthogonal one."""
    if width & (width - 1):
        normal = torch.randn(width, width, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        return torch.linalg.qr(normal).Q.float()
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix / width**0.5


def rotated_per_token(x_BGTK: Tensor, bits: int) -> Rounded:
    """``per_token`` in coordinates that spread outliers over the head; read back in the model's own."""
    turn_KK = rotation(x_BGTK.shape[-1])
    rounded = per_token(x_BGTK @ turn_KK, bits)
    return Rounded(rounded.x @ turn_KK.T, rounded.nbytes)


@dataclass(frozen=True)
class Alternative:
    """A quantiser of the benchmark that treats all layers alike and needs no calibration: a `bits.Quantiser`."""

    model: PreTrainedModel
    bits: int
    keys: Rounding
    values: Rounding

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads in place of these keys and values, whichever the ``layer``."""
        return self.keys(k_BGTK).x, self.values(v_BGTV).x

    def share(self, tokens: int) -> float:
        """Bytes of a cache of so many tokens against those of bfloat16."""
        stored = dense = 0
        for layer in shape_of(self.model).layers:
            for rounding, width in ((self.keys, layer.qk_dim), (self.values, layer.v_dim)):
                empty = torch.zeros(1, layer.kv_heads, tokens, width)
                stored += rounding(empty).nbytes
                dense += 2 * empty.numel()
        return stored / dense


def alternative(bits: int, keys: Rounding, values: Rounding) -> Callable[[PreTrainedModel], Alternative]:
    """From a model to its quantiser."""
    return lambda model: Alternative(model, bits, keys, values)


def alike(bits: int, rounding: Callable[[Tensor, int], Rounded]) -> Callable[[PreTrainedModel], Alternative]:
    """From a model to its quantiser, keys and values by the same ``rounding``."""
    both = functools.partial(rounding, bits=bits)
    return alternative(bits, both, both)


ALTERNATIVES = {
    "bf16": alternative(16, as_bfloat16, as_bfloat16),
    "fp8": alternative(8, as_float8, as_float8),
    **{f"int{bits}": alike(bits, per_token) for bits in (8, 4, 3, 2)},
    **{
        f"kivi-{bits}": alternative(
            bits,
            functools.partial(per_channel, bits=bits),
            functools.partial(per_token_across_heads, bits=bits),
        )
        for bits in (4, 3, 2)
    },
    **{f"hadamard-{bits}": alike(bits, rotated_per_token) for bits in (4, 3, 2)},
}
