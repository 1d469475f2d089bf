"""Exact cost of an attention stack: parameters, bytes in the KV cache, floating-point operations per token.

A multiplication and an addition count as two operations; softmax, norms and rotations are left out, as everywhere, and
so is what runs once per sequence (poolers, classifiers); an image's class token is counted like a patch.
KV bytes are those of transformers' dynamic cache or of headwise's packed one, checked against real ones in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.files.errors import InputError
from headwise.records.rendering import Shown
from headwise.records.shape import LayerShape, ModelShape

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs; FLOPs cover the whole block."""

    parameters: int
    kv_bytes_per_token: int
    kv_bytes: int
    prefill_flops: int
    decode_flops: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model costs at one context, batch and dtype.

    ``kv_bytes_per_token`` is what one more token adds while every layer still grows; ``kv_bytes`` is the whole cache.
    ``prefill_flops`` is the mean per input token, ``decode_flops`` the cost of the next token after ``context``
    tokens (0 for encoders, which do not decode).
    """

    context: int
    batch: int
    dtype: str
    attention_parameters: int
    total_parameters: int
    kv_bytes_per_token: int
    kv_bytes: int
    prefill_flops: int
    decode_flops: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True, slots=True)
class CostReport(Shown):
    """Shapes and costs of a model, and of the same model after a plan (None without one).

    ``kept`` lists, for each layer of ``before``, its number in ``after`` (None: it was dropped or joined), ``changes``
    what is done to it in a short phrase.
    """

    before: ModelShape
    cost: Cost
    after: ModelShape | None = None
    cost_after: Cost | None = None
    kept: tuple[int | None, ...] = ()
    changes: tuple[str, ...] = ()


def cost_of(shape: ModelShape, context: int, batch: int = 1, dtype: str = "bf16") -> Cost:
    """The cost of ``shape`` with ``context`` tokens in each of ``batch`` sequences."""
    if context < 1 or batch < 1:
        raise InputError(f"Context and batch must be at least 1, got {context} and {batch}.")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"Unknown dtype {dtype!r}; use one of {', '.join(DTYPE_BYTES)}.")
    layers = tuple(_layer_cost(layer, shape, context, batch, DTYPE_BYTES[dtype]) for layer in shape.layers)
    decodes = any(layer.cache != "none" for layer in shape.layers)
    # The input of an encoder-decoder is its source: the vocabulary head runs on decoded tokens only.
    head, inputs = 2 * shape.outside_matmul, 2 * shape.input_matmul
    return Cost(
        context=context,
        batch=batch,
        dtype=dtype,
        attention_parameters=shape.attention_parameters(),
        total_parameters=shape.total_parameters(),
        kv_bytes_per_token=sum(layer.kv_bytes_per_token for layer in layers),
        kv_bytes=sum(layer.kv_bytes for layer in layers),
        prefill_flops=sum(layer.prefill_flops for layer in layers) + inputs + (0 if shape.source_tokens else head),
        decode_flops=sum(layer.decode_flops for layer in layers) + (head if decodes else 0),
        layers=layers,
    )


def _layer_cost(layer: LayerShape, shape: ModelShape, context: int, batch: int, bytes_each: int) -> LayerCost:
    kept = layer.cached_tokens(context, shape.source_tokens)
    prefill, decode = _flops(layer, shape, context)
    return LayerCost(
        parameters=layer.parameters(shape.width),
        kv_bytes_per_token=layer.token_bytes(bytes_each) if layer.cache == "tokens" else 0,
        kv_bytes=layer.cache_bytes(kept, batch, bytes_each),
        prefill_flops=prefill,
        decode_flops=decode,
    )


def _flops(layer: LayerShape, shape: ModelShape, context: int) -> tuple[int, int]:
    """Mean FLOPs per input token, and FLOPs of the token that follows ``context`` others."""
    width, source = shape.width, shape.source_tokens
    per_key = 2 * layer.heads * (layer.qk_dim + layer.v_dim)
    weights = 2 * layer.matmul_weights(width) if layer.heads else 0
    rest = 2 * layer.rest_matmul
    if layer.cache == "none":
        return weights + rest + per_key * (source or context), 0
    if layer.cache == "source":
        keys_values = 2 * width * layer.kv_heads * (layer.qk_dim + layer.v_dim)
        return keys_values, weights - keys_values + rest + per_key * source
    # MLA caches latents, and transformers expands all of them again for every new token.
    expansion = 2 * layer.latent_expansion
    decode = weights + rest + per_key * _visible(layer, context + 1) + expansion * context
    if layer.absorbed:  # many tokens at once read keys and values, a single one what stands for them
        per_latent = 4 * layer.heads * (layer.absorbed.pairs + layer.absorbed.rank)
        decode = weights + rest + 2 * layer.heads * layer.reading + per_latent * _visible(layer, context + 1)
        weights += 2 * layer.kv_heads * layer.reading
    if source:  # the decoder of an encoder-decoder sees no input tokens
        return 0, decode
    return weights + rest + per_key * _visible_sum(layer, context) // context, decode


def _visible(layer: LayerShape, position: int) -> int:
    """Keys that the token at one-based ``position`` sees, itself included."""
    return position if layer.window is None else min(position, layer.window)


def _visible_sum(layer: LayerShape, context: int) -> int:
    """Keys seen by all tokens of a causal prefill together."""
    full = context if layer.window is None else min(context, layer.window)
    return full * (full + 1) // 2 + (context - full) * full
