"""One layer of a packed cache: bytes in blocks that grow; first tokens are kept whole, and the last few for a while.

Self-contained: it travels with a model. New tokens wait, whole, until the sequence is a multiple of 16 long, and are
packed together: one by one that would take longer than all of their attention.

Letters: B batch, T tokens, G key/value heads, K key width, V value width, P rotary pairs, R bytes a token takes, A
groups of heads with W value coordinates each, N coordinates of all.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from .packed_attention import Reader, read_even, read_loudness, read_tile
from .packing import Evening, LayerCodes, Layout, nearest_codes, reading
from .slots import BLOCK, CHUNK, RECENT

AT_ONCE = 512  # tokens that are coded at a time: what is in between stays in the processor's caches


def written(method):
    """A method that writes to a layer's tensors: in inference mode too they are such as any mode may write to."""

    @functools.wraps(method)
    def run(layer, *args):
        in_full = torch.autocast(layer.cache.rope.frequencies.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), in_full:
            return method(layer, *args)

    return run


class PackedLayer(CacheLayerMixin):
    """Packed keys and values of one layer. `update` only takes them; `store` packs them, once positions are known."""

    is_sliding, is_croppable = False, True

    def __init__(self, cache: Any, codes: LayerCodes, pairs: Any) -> None:
        super().__init__()
        self.cache, self.codes, self.pairs = cache, codes, pairs
        self.heads, self.key_width = codes.key_bits.shape
        self.value_width = codes.value_bits.numel() // self.heads  # of a joint latent: of keys and values together
        self.blocks: list[torch.Tensor] = []
        self.length = self.past = self.packed_length = 0
        self.pending: Any = None

    def lazy_initialization(self, key_states, value_states) -> None:
        """Lay out bytes for keys and values like these."""
        shapes = [tuple(t.shape[i] for i in (1, 3)) for t in (key_states, value_states)]
        self._expect(*(width for _, width in shapes))
        if shapes != [(self.heads, self.key_width), (self.heads, self.value_width)]:
            raise ValueError(
                f"The codes are for {self.heads} heads of {self.key_width} and {self.value_width} coordinates; "
                f"keys and values come as {shapes[0]} and {shapes[1]}: they are another model's."
            )
        self.device, self.dtype = key_states.device, key_states.dtype
        rope, codes = self.cache.rope, self.codes
        self.codes = codes = codes.to(self.device)
        self.bits, self.levels = codes.bits, codes.levels
        self.evening = Evening(*codes.parts)
        self.layout = Layout(codes.stored_bits, self.device)
        pairs = torch.arange(len(rope.frequencies)) if self.pairs is None else self.pairs
        self.same_pairs = self.pairs is None
        self.pairs = pairs.to(self.device).expand(self.heads, -1).contiguous()
        self.turning = rope.cos, rope.sin, self.pairs
        self.order = None
        if self.cache.spec.interleaved:
            turned = torch.arange(2 * self.pairs.shape[1]).view(-1, 2).T.flatten()
            self.order = torch.cat((turned, torch.arange(len(turned), self.key_width))).to(self.device)
        self._prepare_reading()
        room = key_states.shape[0], self.heads, self.cache.spec.whole + RECENT
        self.whole_keys = key_states.new_zeros(*room, self.key_width)
        self.whole_values = value_states.new_zeros(*room, self.value_width)
        self.is_initialized = True

    def _expect(self, key_width, value_width) -> None:
        """Learn from what comes first what the codes do not say."""

    def _prepare_reading(self) -> None:
        """Lay out where codes are and what makes numbers of them."""
        to_values = self.codes.value_map.float().mT.unflatten(2, (-1, self.value_width))
        self.to_values = to_values.transpose(1, 2).contiguous()  # a map for each head
        sizes = self.codes.key_bits.numel(), self.codes.value_bits.numel(), 1, 1
        keys, values, *loud = zip(*(field.split(sizes, dim=1) for field in self.layout.fields))
        self.keys_reader = self._reader(keys, loud[0], *self.codes.keys)
        self.values_reader = self._reader(values, loud[1], *self.codes.values)
        if self.order is not None:
            self.keys_reader = self.keys_reader.ordered(self.order)
        self.key_reading, self.value_reading = (tuple(vars(r).values()) for r in (self.keys_reader, self.values_reader))

    def picked(self, table_P):
        """Rows of a table (P, ...) for the pairs of each head (G, P, ...), or of all heads (1, P, ...)."""
        return table_P.unsqueeze(0) if self.same_pairs else table_P[self.pairs]

    def _reader(self, fields, loud, bits, levels, gain, loudness):
        offset, scale, bent, step = reading(bits, levels, gain)
        rows, masks, worth = (t.view(2, *bits.shape) for t in fields)
        (row, _), (mask, _), (times, _) = loud  # codes of one field
        low, loud_step, _ = loudness.float()
        return Reader(rows, masks, worth * step, scale, bent, offset, row, mask, times * loud_step, low[None])

    def as_coordinates(self, keys, values):
        """What is coded of keys and values (B, G, T, C): a row (B, T, N)."""
        grouped = values.unflatten(1, (len(self.to_values), -1)).transpose(2, 3).flatten(3)
        parts = keys, grouped @ self.codes.to_coordinates
        return torch.cat([x.transpose(1, 2).flatten(2) for x in parts], dim=2)

    def as_values(self, coordinates):
        """Values (B, G, T, V) of coordinates (B, A, heads of a group, T, W), or (B, A, 1, T, W) for all of them."""
        return (coordinates @ self.to_values).flatten(1, 2)

    def update(self, key_states, value_states, *args, **kwargs):
        """Take new keys and values; the keys that come back know this layer, for `packed_attention` to find."""
        if self.pending is not None:
            raise ValueError(
                "The model's attention did not read the packed keys it was given: pass fused=False to PackedCache, "
                "which unpacks the whole cache at every step."
            )
        self.pending = key_states, value_states
        if self.cache.fused:
            key_states.packed_layer = self
            return key_states, value_states
        past = self.store(None, None)
        return self.unpacked() if past else (key_states, value_states)

    @written
    def store(self, positions, mask) -> int:
        """Take in what `update` was given; returns how many tokens were there before."""
        if self.pending is None:
            return self.past
        (keys, values), self.pending = self.pending, None
        if not self.length:
            self.lazy_initialization(keys, values)
        self.past, tokens = self.length, keys.shape[2]
        self.length += tokens
        done = max(self.packed_length, self.length // RECENT * RECENT)
        this = self.cache.forward_pass(self.past, keys.shape[0], tokens, done, positions, mask)
        if self.past < this.whole_ends:
            self._keep_whole(keys, values)
        waiting, first = self.past - self.packed_length, self.packed_length
        if done > first:
            keys = torch.cat((self._recent(self.whole_keys, waiting), keys), dim=2)
            values = torch.cat((self._recent(self.whole_values, waiting), values), dim=2)
            for start in range(first, done, AT_ONCE):
                stop = min(start + AT_ONCE, done)
                part = slice(start - first, stop - first)
                self._pack(keys[:, :, part], values[:, :, part], this.unturn(start, stop))
            keys, values, waiting = keys[:, :, done - first :], values[:, :, done - first :], 0
        if keys.shape[2]:
            self._recent(self.whole_keys, waiting + keys.shape[2])[:, :, waiting:] = keys
            self._recent(self.whole_values, waiting + keys.shape[2])[:, :, waiting:] = values
        return self.past

    def _recent(self, whole_BGTC, count):
        """As many of the tokens that wait to be packed."""
        first = self.cache.spec.whole
        return whole_BGTC[:, :, first : first + count]

    def _pack(self, keys, values, unturn) -> None:
        beside = self.as_coordinates(self._turn(keys.float(), unturn), values.float()) - self.evening.offset
        loud = self.evening.codes(beside)
        codes = nearest_codes(beside / self.evening.loudness(loud), self.bits, self.levels)
        self._append(self.layout.pack(torch.cat((codes, loud), dim=2).transpose(1, 2)))

    def _turn(self, keys, phases):
        """Keys (B, G, T, K) with the rotated pairs multiplied by ``phases`` (P, B, T)."""
        if phases is None:
            return keys
        count, phases = self.pairs.shape[1], self.picked(phases).permute(2, 0, 3, 1)
        keys = keys if self.order is None else keys[..., self.order]
        turned = torch.complex(keys[..., :count], keys[..., count : 2 * count]) * phases
        keys = torch.cat((turned.real, turned.imag, keys[..., 2 * count :]), dim=-1)
        return keys if self.order is None else keys[..., self.order.argsort()]

    def _keep_whole(self, keys, values) -> None:
        index = self.cache.padding[:, None] + torch.arange(self.cache.spec.whole, device=self.device) - self.past
        fresh = ((index >= 0) & (index < keys.shape[2]))[:, None, :, None]
        index = index.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        for new, whole in ((keys, self.whole_keys), (values, self.whole_values)):
            kept = whole[:, :, : self.cache.spec.whole]
            kept.copy_(torch.where(fresh, new.gather(2, index.expand_as(kept)), kept))

    def _append(self, packed) -> None:
        while packed.shape[-1]:
            number, start = divmod(self.packed_length, BLOCK)
            count = min(packed.shape[-1], BLOCK - start)
            room = max(-(-(start + count) // CHUNK), 2) * CHUNK  # compilers treat one of something as special
            if number == len(self.blocks):
                self.blocks.append(packed.new_zeros(*packed.shape[:2], room))
            elif self.blocks[number].shape[-1] < room:
                self.blocks[number] = F.pad(self.blocks[number], (0, room - self.blocks[number].shape[-1]))
            self.blocks[number][..., start : start + count] = packed[..., :count]
            self.packed_length += count
            packed = packed[..., count:]

    @property
    def packed(self):
        """All bytes (B, R, T)."""
        if not self.blocks:
            return torch.zeros(len(self.whole_keys), self.layout.rows, 0, dtype=torch.uint8, device=self.device)
        return torch.cat(self.blocks, dim=-1)[..., : self.packed_length]

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """What is to be saved of a layer."""
        used = self.cache.spec.whole + self.length - self.packed_length
        whole = {"whole_keys": self.whole_keys[:, :, :used], "whole_values": self.whole_values[:, :, :used]}
        return {"packed": self.packed, **whole}

    @written
    def fill(self, packed, whole_keys, whole_values) -> None:
        """Take what was saved of another layer."""
        self.lazy_initialization(whole_keys, whole_values)
        if packed.shape[:2] != (len(whole_keys), self.layout.rows) or packed.dtype != torch.uint8:
            raise ValueError(f"{packed.shape[1]} bytes a token, not {self.layout.rows}")
        self._append(packed)
        used = whole_keys.shape[2]
        self.whole_keys[:, :, :used], self.whole_values[:, :, :used] = whole_keys, whole_values
        self.length = self.packed_length + used - self.cache.spec.whole

    def read(self, run, few, softcap, query, block, bias, state):
        """The state of a softmax after one more block."""
        return read_tile(
            run, few, softcap, query, block, bias, state, self.turning, self.key_reading, self.value_reading
        )

    def no_sums(self, query):
        """Weighted sums of nothing, for queries (B, G, Q, K)."""
        groups, width = self.to_values.shape[0], self.to_values.shape[2]
        return query.new_zeros(len(query), groups, self.heads // groups * query.shape[2], width)

    def summed_values(self, sums, weight):
        """Values (B, G, Q, V) of weighted sums, whose weights add up to ``weight`` (B, G, Q, 1)."""
        return self.as_values(sums.unflatten(2, (self.heads // len(self.to_values), -1)))

    def _read_all(self):
        """Keys before RoPE (B, G, T, K) and values (B, G, T, V) of everything packed."""
        readers, packed = (self.keys_reader, self.values_reader), self.packed
        keys, values = (
            r.offset[..., None]
            + read_even(packed, r.rows, r.masks, r.steps, r.scale, r.bent)
            * read_loudness(packed, r.loud_row, r.loud_mask, r.loud_step, r.loud_low).unsqueeze(1)
            for r in readers
        )
        keys = keys.transpose(-1, -2)
        if self.order is not None:
            keys = keys[..., self.order.argsort()]
        return keys, self.as_values(values.transpose(-1, -2).unsqueeze(2))

    def unpacked(self):
        """All keys (B, G, T, K) and values (B, G, T, V) as the model would have them."""
        (keys, values), rope = self._read_all(), self.cache.rope
        if self.pairs.shape[1]:
            slots = torch.arange(self.packed_length, device=self.device) - self.cache.ahead[:, None]
            keys = self._turn(keys, rope.phases(slots) * rope.scale)
        waiting = self.length - self.packed_length
        keys = torch.cat((keys, self._recent(self.whole_keys, waiting).float()), dim=2)
        values = torch.cat((values, self._recent(self.whole_values, waiting).float()), dim=2)
        for j in range(self.cache.spec.whole):
            index = self.cache.padding + j
            rows = (index < self.length).nonzero().flatten()
            keys[rows, :, index[rows]] = self.whole_keys[rows, :, j].float()
            values[rows, :, index[rows]] = self.whole_values[rows, :, j].float()
        return keys.to(self.dtype), values.to(self.dtype)

    def get_seq_length(self) -> int:
        """Tokens stored, and those that are about to be."""
        return self.length + (0 if self.pending is None else self.pending[0].shape[2])

    def get_max_length(self) -> int:
        """None: it grows."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that a mask must cover, and the first of them."""
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget as many of the last tokens (a negative number), or all but so many (a positive one)."""
        length = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        self.length = max(length, 0)
        self.packed_length = min(self.packed_length, self.length)
        del self.blocks[-(-self.packed_length // BLOCK) :]

    def reset(self) -> None:
        """Forget everything."""
        self.blocks, self.pending, self.is_initialized = [], None, False
        self.length = self.past = self.packed_length = 0

    @written
    def rearrange(self, change) -> None:
        """Apply ``change`` to the rows of everything."""
        if self.is_initialized:
            self.blocks = [change(block) for block in self.blocks]
            self.whole_keys, self.whole_values = change(self.whole_keys), change(self.whole_values)

    @property
    def nbytes(self) -> int:
        """Bytes of the bits and levels and of what is stored."""
        size = self.codes.level_bytes
        if self.length:
            whole = min(self.length, self.cache.spec.whole) + self.length - self.packed_length
            token = self.heads * (self.key_width + self.value_width) * self.dtype.itemsize
            size += len(self.whole_keys) * (self.packed_length * self.layout.rows + whole * token)
        return size
