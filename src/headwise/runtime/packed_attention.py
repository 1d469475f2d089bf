"""Attention that reads a packed cache: tile by tile, nothing of the cache is ever unpacked as a whole.

Self-contained: it travels with a model. Keys are stored as they are before RoPE. What was read is turned by its slot
within a chunk of 256, the query by the chunk's first slot: RoPE is relative, so that is exact, and one small table
serves any length. Values are stored as coordinates that groups of heads share: all queries of a group sum all of its
coordinates, and a map makes values of the sums.

Letters: B batch, T new tokens, H query heads, G key/value heads, K key width, V value width, P rotary pairs of a head,
R bytes a token takes, S slots of a tile in C chunks of 256, Q queries that read one key/value head (H / G * T), A
groups of heads with W value coordinates each, N queries of a group (G / A * Q).
"""

import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .slots import CHUNK, HIDDEN

COMPILE_FROM = 1024  # slots; below, compiling takes longer than it saves
FEW_QUERIES = 12  # of one group of heads; with more, matrix products win
OPTIONS: dict[str, Any] = {  # one loop over the bytes: nothing in between is written to memory
    "realize_reads_threshold": 1000,
    "realize_opcount_threshold": 10000,
    "realize_acc_reads_threshold": 1000,
    "assert_indirect_indexing": False,
}
COMPILED: dict = {}
NAMES = {"sdpa": "headwise_packed", "eager": "headwise_packed_eager"}  # what runs besides: our attention function


@dataclass
class Reader:
    """How the codes of keys (G, K) or of value coordinates (A, W) are read: where they lie and what they stand for."""

    rows: torch.Tensor  # (2, G, C) bytes of both fields
    masks: torch.Tensor  # (2, G, C) bits of them
    steps: torch.Tensor  # (2, G, C) what they add to u
    scale: torch.Tensor  # (G, C) what u counts
    bent: torch.Tensor  # (G, C) what its cube counts
    offset: torch.Tensor  # (G, C)
    loud_row: torch.Tensor  # (1,) byte of the loudness
    loud_mask: torch.Tensor  # (1,) bits of it
    loud_step: torch.Tensor  # (1,) what they add to its root
    loud_low: torch.Tensor  # (1,) its root at code 0

    def ordered(self, order):
        """The same with coordinates in another ``order``."""
        names = "rows", "masks", "steps", "scale", "bent", "offset"
        return replace(self, **{name: getattr(self, name)[..., order].contiguous() for name in names})


def read_loudness(packed, row, mask, step, low):
    """How loud tokens are (B, 1, ...), in bytes (B, R, ...)."""
    tail = (..., *[None] * (packed.ndim - 2))
    root = low[tail] + (packed[:, row] & mask[tail]).float() * step[tail]
    return root * root


def read_even(packed, rows, masks, steps, scale, bent, part=slice(None)):
    """Deviations (B, G, C, ...) in bytes (B, R, ...), were all tokens alike in loudness."""
    tail = (..., *[None] * (packed.ndim - 2))
    first, second = (
        (packed[:, row[:, part]] & mask[:, part][tail]).float() * step[:, part][tail]
        for row, mask, step in zip(rows, masks, steps)
    )
    u = first + second - 1
    return u * (scale[:, part][tail] + bent[:, part][tail] * (u * u))


def turned(x_GK, cos_PJ, sin_PJ, pairs_GP):
    """Keys (..., G, K, C, 256), in parts, turned by their slots in a chunk: halves of pairs, and the rest."""
    first, second, rest = x_GK
    if pairs_GP.shape[1]:
        cos, sin = cos_PJ[pairs_GP].unsqueeze(-2), sin_PJ[pairs_GP].unsqueeze(-2)
        first, second = first * cos - second * sin, second * cos + first * sin
    return first, second, rest


def in_parts(pairs_GP):
    """Where first halves of pairs, second halves and the rest are."""
    P = pairs_GP.shape[1]
    return slice(0, P), slice(P, 2 * P), slice(2 * P, None)


def key_logits(few, query_BGQKC, packed_BRS, turning, reading, offset_GK, loud):
    """Logits (B, G, Q, S) of a tile: of deviations, times how loud tokens are, and of the offsets."""
    packed, pairs_GP = packed_BRS.unflatten(-1, (-1, CHUNK)), turning[-1]
    parts = in_parts(pairs_GP)
    keys = turned([read_even(packed, *reading, part=part) for part in parts], *turning)
    offsets = turned([offset_GK[:, part, None, None].expand(-1, -1, 1, CHUNK) for part in parts], *turning)
    query_BGCQK = query_BGQKC.permute(0, 1, 4, 2, 3)
    of_offsets = (query_BGCQK @ torch.cat(offsets, dim=1).transpose(1, 2)).transpose(2, 3)
    if few:
        of_keys = few_products(query_BGQKC, keys, parts)
    else:
        of_keys = (query_BGCQK @ torch.cat(keys, dim=2).transpose(2, 3)).transpose(2, 3)
    return (of_keys * read_loudness(packed, *loud).unsqueeze(1) + of_offsets).flatten(-2)


def few_products(query_BGQKC, keys, parts):
    """Products (B, G, Q, C, 256) as sums, which a compiler turns into one loop that reads bytes and writes logits."""
    logits = []
    for query in query_BGQKC.unsqueeze(-1).unbind(2):
        first, second, rest = (query[:, :, part] * key for part, key in zip(parts, keys))
        logits.append((first + second).sum(2) + rest.sum(2))
    return torch.stack(logits, dim=2)


def value_sums(few, weights_BANS, packed_BRS, reading):
    """Sums (B, A, N, W) of deviations, by matrix products or as sums for a compiler."""
    values = read_even(packed_BRS, *reading)
    if few:
        return torch.stack([(weights.unsqueeze(2) * values).sum(-1) for weights in weights_BANS.unbind(2)], dim=2)
    return weights_BANS @ values.transpose(-1, -2)


def read_tile(softcap, query_BGQKC, packed_BRS, bias_BTS, state, turning, keys, values, few=False):
    """The state of a softmax (highest logit, sum, weighted value coordinates) after the slots of one more tile."""
    highest, total, output = state
    B, G, Q = highest.shape[:3]
    logits = key_logits(few, query_BGQKC, packed_BRS, turning, keys[:5], keys[5], keys[6:])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    T = bias_BTS.shape[1]
    logits = (logits.view(B, G, Q // T, T, -1) + bias_BTS[:, None, None]).view(B, G, Q, -1)
    new = torch.maximum(highest, logits.amax(-1, keepdim=True))
    weights, fade = torch.exp(logits - new), torch.exp(highest - new)
    sums = weights.sum(-1, keepdim=True)
    loud_weights = weights * read_loudness(packed_BRS, *values[6:]).unsqueeze(1)
    grouped = output.shape[:3]
    deviations = value_sums(few, loud_weights.view(*grouped, -1), packed_BRS, values[:5])
    means = sums.view(*grouped, 1) * values[5][:, None]
    return new, total * fade + sums, output * fade.view(*grouped, 1) + deviations + means


def few_read_tile(*args):
    """`read_tile` as sums, for a compiler."""
    return read_tile(*args, few=True)


def compiled(function, softcap, query, packed, bias, *rest):
    """``function`` of a tile, compiled once for all layers and lengths; without a compiler, as it is."""
    if COMPILED.get("impossible"):
        return read_tile(softcap, query, packed, bias, *rest)
    try:
        for tensor in (query, packed, bias):
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1)
        if function not in COMPILED:
            COMPILED[function] = torch.compile(function, options=OPTIONS)
        return COMPILED[function](softcap, query, packed, bias, *rest)
    except Exception as error:  # compilers fail in many ways; what else is wrong shows in the next line
        result = read_tile(softcap, query, packed, bias, *rest)
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Attention over a packed cache runs uncompiled, which is slower: {reason}", stacklevel=2)
        COMPILED["impossible"] = True
        return result


def attend(layer, query, scaling, softcap, this):
    """Attention (B, T, H, V) of queries over everything that ``layer`` stores, in the forward pass ``this``."""
    B, H, T, _ = query.shape
    G = layer.heads
    grouped = query.float().mul(scaling).reshape(B, G, H // G * T, -1)
    queries, state, start = turned_queries(layer, grouped, this), read_whole(softcap, grouped, layer, this), 0
    read = read_tile
    if layer.length >= COMPILE_FROM and not query.requires_grad:
        read = partial(compiled, few_read_tile if T == 1 and state[2].shape[2] <= FEW_QUERIES else read_tile)
    for block in layer.blocks:
        size = block.shape[-1]
        of_chunks, bias = queries(start, size), this.bias(start, size)
        state = read(softcap, of_chunks, block, bias, state, layer.turning, layer.key_reading, layer.value_reading)
        start += size
    _, total, output = state
    values = layer.as_values(output.unflatten(2, (-1, H // G * T)))
    return (values / total).view(B, H, T, -1).transpose(1, 2).to(query.dtype).contiguous()


def read_whole(softcap, query_BGQK, layer, this):
    """The state of a softmax after the tokens that are kept whole."""
    B, G, Q, _ = query_BGQK.shape
    A, W = layer.codes.value_bits.shape
    if not layer.whole_keys.shape[2]:
        highest = query_BGQK.new_full((B, G, Q, 1), HIDDEN)
        return highest, torch.zeros_like(highest), query_BGQK.new_zeros(B, A, G // A * Q, W)
    logits = query_BGQK @ layer.whole_keys.float().transpose(-1, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = (logits.view(B, G, -1, *this.whole_bias.shape[1:]) + this.whole_bias[:, None, None]).view(B, G, Q, -1)
    highest = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - highest)
    output = weights.view(B, A, G // A * Q, -1) @ layer.as_coordinates(layer.whole_values.float())
    return highest, weights.sum(-1, keepdim=True), output


def turned_queries(layer, query_BGQK, this):
    """A function of slots: the queries (B, G, Q, K, C) for each chunk of them, turned back by its first slot."""
    query, P = query_BGQK, layer.pairs.shape[1]
    if not P:
        return lambda _, size: query.unsqueeze(-1).expand(*[-1] * 4, size // CHUNK).contiguous()
    query = query if layer.order is None else query[..., layer.order]
    pairs = torch.complex(query[..., :P], query[..., P : 2 * P]) * layer.cache.rope.scale
    if this.turn is not None:
        pairs = pairs * layer.picked(this.turn).permute(2, 0, 1).unsqueeze(2)

    def of_chunks(start, size):
        phases = layer.picked(this.phases[:, start // CHUNK : (start + size) // CHUNK])
        each = pairs.unsqueeze(-1) * phases.unsqueeze(1)
        rest = query[..., 2 * P :].unsqueeze(-1).expand(*[-1] * 4, size // CHUNK)
        return torch.cat((each.real, each.imag, rest), dim=3)

    return of_chunks


@torch.compiler.disable
def packed_attention(module, query, key, value, attention_mask, previous="sdpa", **kwargs):
    """An attention function for transformers: reads the packed layer that made ``key``; without one, as before."""
    layer: Any = getattr(key, "packed_layer", None)
    if layer is None or not layer.store(kwargs.get("position_ids"), attention_mask):
        return plain_attention(module, query, key, value, attention_mask, previous, **kwargs)
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} adds {name} to its logits, which a packed cache cannot.")
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return attend(layer, query, scaling, kwargs.get("softcap"), layer.cache.current), None


def plain_attention(module, query, key, value, attention_mask, previous, **kwargs):
    """What the model ran before it was given a packed cache."""
    if hasattr(module, "attend_by"):
        return module.attend_by(previous, query, key, value, attention_mask, **kwargs)
    if previous == "eager":
        places = (sys.modules[cls.__module__] for cls in type(module).__mro__)
        function = next(place.eager_attention_forward for place in places if hasattr(place, "eager_attention_forward"))
    else:
        function = ALL_ATTENTION_FUNCTIONS[previous]
    return function(module, query, key, value, attention_mask, **kwargs)


def eager_packed_attention(*args, **kwargs):
    """`packed_attention` in models that ran the eager attention of their own file."""
    return packed_attention(*args, **kwargs, previous="eager")


_functions: dict[str, Any] = {"sdpa": packed_attention, "eager": eager_packed_attention}
for _name, _function in _functions.items():
    _function.any_width = True  # of keys and values; per-layer models pad for functions without this mark
    AttentionInterface.register(NAMES[_name], _function)
    AttentionMaskInterface.register(NAMES[_name], ALL_MASK_ATTENTION_FUNCTIONS[_name])


def use_packed_attention(model):
    """Make ``model`` run `packed_attention`, which does what it ran before wherever there is no packed cache."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    if before in NAMES.values():
        return
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} has attention of its own that cannot read packed numbers: "
            "pass fused=False, which unpacks the whole cache at every step."
        )
    with warnings.catch_warnings():
        model.set_attn_implementation(NAMES["eager" if before == "eager" else "sdpa"])
