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
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .slots import CHUNK

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

    def taken(self, places):
        """The same of some coordinates of each group: ``places`` (A, L)."""
        both = {name: getattr(self, name).gather(2, places.expand(2, -1, -1)) for name in ("rows", "masks", "steps")}
        return replace(self, **both, **{n: getattr(self, n).gather(1, places) for n in ("scale", "bent", "offset")})

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


def key_logits(few, query_BGQKC, packed_BRCS, turning, keys):
    """Logits (B, G, Q, C, 256) of a tile."""
    loudness = read_loudness(packed_BRCS, *keys[6:]).unsqueeze(1)
    parts = in_parts(turning[-1])
    read = (read_even(packed_BRCS, *keys[:5], part=part) * loudness + keys[5][:, part, None, None] for part in parts)
    return products(few, query_BGQKC, turned(read, *turning), parts)


def products(few, query_BGQKC, keys, parts):
    """Logits (B, G, Q, C, 256) of keys in parts.

    Few of them as sums, which a compiler turns into one loop that reads bytes and writes logits.
    """
    if not few:
        return (query_BGQKC.permute(0, 1, 4, 2, 3) @ torch.cat(keys, dim=2).transpose(2, 3)).transpose(2, 3)
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


def weigh_tile(few, softcap, query_BGQKC, packed_BRCS, bias_BTCS, highest, total, turning, keys, loud):
    """The highest logit and the sum of a softmax after the slots of one more tile, and what that tile adds to them.

    That is: how much earlier sums fade, the tile's own sum, and the weights (B, G, Q, C, 256) times how loud values
    are. Slots stay in chunks throughout: a compiler makes slow loops of two shapes.
    """
    logits = key_logits(few, query_BGQKC, packed_BRCS, turning, keys)
    *state, weights = weigh(logits, softcap, bias_BTCS, highest, total)
    return *state, weights * read_loudness(packed_BRCS, *loud).unsqueeze(1)


def weigh(logits_BGQCS, softcap, bias_BTCS, highest, total):
    """The same for logits: highest, sum, how much earlier sums fade, the tile's own sum, weights."""
    if softcap is not None:
        logits_BGQCS = torch.tanh(logits_BGQCS / softcap) * softcap
    T = bias_BTCS.shape[1]
    logits_BGQCS = (logits_BGQCS.unflatten(2, (-1, T)) + bias_BTCS[:, None, None]).flatten(2, 3)
    new = torch.maximum(highest, logits_BGQCS.amax((-2, -1)).unsqueeze(-1))
    weights, fade = torch.exp(logits_BGQCS - new.unsqueeze(-1)), torch.exp(highest - new)
    sums = weights.sum((-2, -1)).unsqueeze(-1)
    return new, total * fade + sums, fade, sums, weights


def sum_tile(few, loud_weights, packed_BRS, output, fade, sums, values):
    """The weighted value coordinates (B, A, N, W) after the slots of one more tile."""
    grouped = output.shape[:3]
    deviations = value_sums(few, loud_weights.view(*grouped, -1), packed_BRS, values[:5])
    return output * fade.view(*grouped, 1) + deviations + sums.view(*grouped, 1) * values[5][:, None]


def read_tile(run, few, softcap, query_BGQKC, packed_BRS, bias_BTS, state, turning, keys, values):
    """The state of a softmax (highest logit, sum, weighted value coordinates) after the slots of one more tile.

    Two functions for ``run`` to run: in one, compilers would work the weights out anew for each coordinate of values.
    """
    highest, total, output = state
    packed, bias = (t.unflatten(-1, (-1, CHUNK)) for t in (packed_BRS, bias_BTS))
    new, total, *rest, weights = run(
        weigh_tile, few, softcap, query_BGQKC, packed, bias, highest, total, turning, keys, values[6:]
    )
    return new, total, run(sum_tile, few, weights.flatten(-2), packed_BRS, output, *rest, values)


GROWING = {weigh_tile: {2: 4, 3: 2, 4: 2}, sum_tile: {1: 3, 2: 2}}  # arguments, and dimensions that count slots


def plainly(function, *args):
    """``function`` as it is."""
    return function(*args)


def compiled(function, *args):
    """``function`` compiled once for all layers and lengths; without a compiler, as it is."""
    if COMPILED.get("impossible"):
        return function(*args)
    try:
        for place, dimension in GROWING[function].items():
            torch._dynamo.maybe_mark_dynamic(args[place], dimension)
        key = function, args[0]
        if key not in COMPILED:
            COMPILED[key] = torch.compile(function, options=OPTIONS)
        return COMPILED[key](*args)
    except Exception as error:  # compilers fail in many ways; what else is wrong shows in the next line
        result = function(*args)
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Attention over a packed cache runs uncompiled, which is slower: {reason}", stacklevel=2)
        COMPILED["impossible"] = True
        return result


def attend(layer, query, scaling, softcap, this):
    """Attention (B, T, H, V) of queries over everything that ``layer`` stores, in the forward pass ``this``."""
    B, H, T, _ = query.shape
    G = layer.heads
    grouped = query.float().mul(scaling).reshape(B, G, H // G * T, -1)
    queries, start = turned_queries(layer, grouped, this), 0
    first, whole_total, whole_values = read_whole(softcap, grouped, layer, this)
    state = first, whole_total, layer.no_sums(grouped)
    run, few = plainly, False
    if layer.packed_length >= COMPILE_FROM and not query.requires_grad:
        run, few = compiled, T == 1 and state[2].shape[2] <= FEW_QUERIES
    for block in layer.blocks:
        size = block.shape[-1]
        of_chunks, bias = queries(start, size), this.bias(start, size)
        state = layer.read(run, few, softcap, of_chunks, block, bias, state)
        start += size
    highest, total, output = state
    fade = torch.exp(first - highest)
    values = layer.summed_values(output, total - whole_total * fade) + whole_values * fade
    return (values / total).view(B, H, T, -1).transpose(1, 2).to(query.dtype).contiguous()


def read_whole(softcap, query_BGQK, layer, this):
    """The highest logit, the sum and the weighted values (B, G, Q, V) of a softmax over the tokens kept whole."""
    B, G, Q, _ = query_BGQK.shape
    logits = query_BGQK @ layer.whole_keys.float().transpose(-1, -2)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = (logits.view(B, G, -1, *this.whole_bias.shape[1:]) + this.whole_bias[:, None, None]).view(B, G, Q, -1)
    highest = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - highest)
    return highest, weights.sum(-1, keepdim=True), weights @ layer.whole_values.float()


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
    with torch.autocast(query.device.type, enabled=False):
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
