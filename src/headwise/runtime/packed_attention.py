"""Attention that reads a packed cache: tile by tile, nothing of the cache is ever unpacked as a whole.

Self-contained: it travels with a model. Keys are stored as they are before RoPE. What was read is turned by its slot
within a chunk of 256, the query by the chunk's first slot: RoPE is relative, so that is exact, and one small table
serves any length.

Letters: B batch, T new tokens, H query heads, G key/value heads, K key width, V value width, P rotary pairs of a head,
R bytes a token takes, S slots of a tile in C chunks of 256, Q queries that read one key/value head (H / G * T).
"""

import sys
import warnings
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .slots import CHUNK, HIDDEN

COMPILE_FROM = 2048  # slots; below, compiling takes longer than it saves
COMPILED_QUERIES = 8  # of one key/value head; with more, matrix products win
NAMES = {"sdpa": "headwise_packed", "eager": "headwise_packed_eager"}  # what runs besides: our attention function


@dataclass
class Reader:
    """How the codes of keys or of values (G, C) are read: where their fields lie and what they stand for."""

    rows: torch.Tensor  # (2, G, C) bytes of both fields
    masks: torch.Tensor  # (2, G, C) bits of them
    steps: torch.Tensor  # (2, G, C) what they add to u
    cubic: torch.Tensor  # (G, C)
    scale: torch.Tensor  # (G, C)
    offset: torch.Tensor  # (G, C)

    def ordered(self, order):
        """The same with coordinates in another ``order``."""
        return Reader(*(t[..., order].contiguous() for t in vars(self).values()))


def read_shape(packed_BRS, rows, masks, steps, cubic):
    """u + cubic * u^3 of each coordinate (B, G, C, S): all but scale and offset."""
    first = (packed_BRS[:, rows[0]] & masks[0].unsqueeze(-1)) * steps[0].unsqueeze(-1)
    second = (packed_BRS[:, rows[1]] & masks[1].unsqueeze(-1)) * steps[1].unsqueeze(-1)
    u = first + second - 1
    return u + cubic.unsqueeze(-1) * (u * u * u)


def read_keys(packed_BRS, cos_PJ, sin_PJ, pairs_GP, rows, masks, steps, cubic, scale, offset):
    """Keys (B, G, K, C, 256), turned by their slot in the chunk; first halves of all pairs, second halves, the rest."""
    keys = offset.unsqueeze(-1) + scale.unsqueeze(-1) * read_shape(packed_BRS, rows, masks, steps, cubic)
    keys = keys.unflatten(-1, (-1, CHUNK))
    count = pairs_GP.shape[1]
    if count == 0:
        return keys
    cos, sin = cos_PJ[pairs_GP].unsqueeze(-2), sin_PJ[pairs_GP].unsqueeze(-2)
    first, second, rest = keys[:, :, :count], keys[:, :, count : 2 * count], keys[:, :, 2 * count :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2)


def key_logits(query_BGQKC, *reading):
    """Logits (B, G, Q, S) of a tile by matrix products."""
    keys = read_keys(*reading)
    logits = query_BGQKC.permute(0, 1, 4, 2, 3) @ keys.permute(0, 1, 3, 2, 4)
    return logits.transpose(2, 3).flatten(-2)


def value_sums(weights_BGQS, packed_BRS, rows, masks, steps, cubic):
    """Sums (B, G, Q, V) of the values' shapes by matrix products."""
    return weights_BGQS @ read_shape(packed_BRS, rows, masks, steps, cubic).transpose(-1, -2)


def attend(layer, query, scaling, softcap, step):
    """Attention (B, T, H, V) of queries over everything that ``layer`` stores."""
    B, H, T, _ = query.shape
    G = layer.keys_reader.cubic.shape[0]
    grouped = query.float().mul(scaling).reshape(B, G, H // G * T, -1)
    chunks = turned_queries(layer, grouped.view(B, G, H // G, T, -1), step)
    highest = grouped.new_full(grouped.shape[:-1], HIDDEN).unsqueeze(-1)
    total, output = torch.zeros_like(highest), 0.0

    def add(logits, bias, values):
        nonlocal highest, total, output
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = (logits.view(B, G, H // G, T, -1) + bias[:, None, None]).view(B, G, H // G * T, -1)
        new = torch.maximum(highest, logits.amax(-1, keepdim=True))
        weights, fade = torch.exp(logits - new), torch.exp(highest - new)
        sums = weights.sum(-1, keepdim=True)
        output = output * fade + values(weights, sums)
        total, highest = total * fade + sums, new

    if layer.whole_keys.shape[2]:
        logits = grouped @ layer.whole_keys.float().transpose(-1, -2)
        add(logits, step.whole_bias, lambda weights, _: weights @ layer.whole_values.float())
    keys, values, start = layer.keys_reader, layer.values_reader, 0
    for block in layer.blocks:
        size = block.shape[-1]
        queries = chunks[..., start // CHUNK : (start + size) // CHUNK]
        logits = key_logits(queries, block, *layer.turning, *vars(keys).values())

        def packed_values(weights, sums, block=block):
            shapes = value_sums(weights, block, values.rows, values.masks, values.steps, values.cubic)
            return shapes * values.scale[:, None] + sums * values.offset[:, None]

        add(logits, step.bias[..., start : start + size], packed_values)
        start += size
    return (output / total).view(B, H, T, -1).transpose(1, 2).to(query.dtype).contiguous()


def turned_queries(layer, query_BGHTK, step):
    """Queries (B, G, Q, K, C) for each chunk, turned back by the first slot of it."""
    query, chunks = query_BGHTK, step.slots // CHUNK
    pairs = layer.pairs
    count = pairs.shape[1]
    if not count:
        return query.flatten(2, 3).unsqueeze(-1).expand(*[-1] * 4, chunks)
    if layer.order is not None:
        query = query[..., layer.order]
    turned = torch.complex(query[..., :count], query[..., count : 2 * count]) * layer.cache.rope.scale
    if step.turn is not None:
        turned = turned * step.turn[:, pairs][:, :, None, None]
    turned = turned.flatten(2, 3).unsqueeze(-1) * step.phases[pairs][:, None].conj()
    rest = query[..., 2 * count :].flatten(2, 3).unsqueeze(-1).expand(*[-1] * 4, chunks)
    return torch.cat((turned.real, turned.imag, rest), dim=3)


@torch.compiler.disable
def packed_attention(module, query, key, value, attention_mask, previous="sdpa", **kwargs):
    """An attention function for transformers: reads the packed layer that made ``key``; without one, as before."""
    layer = getattr(key, "packed_layer", None)
    past = layer.store(kwargs.get("position_ids"), attention_mask) if layer is not None else 0
    if not past:
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


for _name, _function in (("sdpa", packed_attention), ("eager", eager_packed_attention)):
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
