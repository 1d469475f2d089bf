"""One layer of a packed cache that holds one latent for keys and values: keys are made anew, tile by tile.

Self-contained: it travels with a model. Where the model runs in half precision, so do the products that make keys.

Letters: as in packed_layer.py, with L coordinates of a group that have any bits, and K and V those of one head.
"""

import torch

from .packed_attention import GROWING, in_parts, products, read_even, read_loudness, turned, weigh
from .packed_layer import PackedLayer
from .packing import together
from .slots import CHUNK


def read_latent(dtype, packed_BRS, reading):
    """Deviations (B, A, L, S) of the coordinates of a tile."""
    return (read_even(packed_BRS, *reading[:5]) * read_loudness(packed_BRS, *reading[6:]).unsqueeze(1)).to(dtype)


def weigh_keys(few, softcap, query_BGQKC, keys_BGKCS, base_GK, bias_BTCS, highest, total, turning):
    """As `weigh` in packed_attention.py, for deviations of keys before RoPE from their ``base``."""
    parts = in_parts(turning[-1])
    base = base_GK[:, :, None, None]
    turned_keys = turned((keys_BGKCS[:, :, part].float() + base[:, part] for part in parts), *turning)
    return weigh(products(few, query_BGQKC, turned_keys, parts), softcap, bias_BTCS, highest, total)


def times(left_BAMS, right_BALS):
    """``left`` times each ``right`` transposed, one by one: batches of products in half precision are slow on CPUs."""
    if left_BAMS.dtype == torch.float32 or left_BAMS.device.type != "cpu":
        return left_BAMS @ right_BALS.mT
    pairs = zip(left_BAMS.flatten(0, 1), right_BALS.flatten(0, 1))
    return torch.stack([left @ right.mT for left, right in pairs]).unflatten(0, left_BAMS.shape[:2])


GROWING |= {read_latent: {1: 2}, weigh_keys: {2: 4, 3: 3, 5: 2}}


class JointLayer(PackedLayer):
    """Packed coordinates that stand for the keys and values of a group of heads."""

    def _expect(self, key_width, value_width) -> None:
        if key_width + value_width == self.key_width + self.value_width:
            self.key_width, self.value_width = key_width, value_width

    def _prepare_reading(self) -> None:
        codes, groups = self.codes, len(self.codes.value_bits)
        self.product_dtype = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        both = codes.value_map.float()
        base = both @ codes.value_levels[..., :1].float()  # where every coordinate is its mean
        live = codes.value_bits > 0
        kept = live.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(live.sum(1).max()))]
        both = both.gather(2, kept[:, None].expand(-1, both.shape[1], -1))
        size = self.heads // groups
        to_keys, to_values = both.split((size * self.key_width, size * self.value_width), dim=1)
        key_base, value_base = base.split((size * self.key_width, size * self.value_width), dim=1)
        if self.order is not None:
            to_keys, key_base = (
                t.unflatten(1, (size, -1))[:, :, self.order].flatten(1, 2) for t in (to_keys, key_base)
            )
        self.to_keys = to_keys.contiguous().to(self.product_dtype)
        self.key_base = key_base.reshape(self.heads, self.key_width)
        self.to_values = to_values.unflatten(1, (size, -1)).mT.contiguous()  # (A, heads of a group, L, V)
        self.value_base = value_base.unflatten(1, (size, -1)).mT.flatten(0, 1)  # (G, 1, V)
        sizes = codes.value_bits.numel(), 1
        fields, loud = zip(*(field.split(sizes, dim=1) for field in self.layout.fields))
        self.reading = tuple(vars(self._reader(fields, loud, *codes.values).taken(kept)).values())

    def as_coordinates(self, keys, values):
        """What is coded of keys and values (B, G, T, C): a row (B, T, N)."""
        both = together(keys.transpose(1, 2), values.transpose(1, 2), len(self.to_values))
        return (both.unsqueeze(-2) @ self.codes.to_coordinates).flatten(2)

    def read(self, run, few, softcap, query, block, bias, state):
        """The state of a softmax after one more block."""
        highest, total, output = state
        latent = run(read_latent, self.product_dtype, block, self.reading)
        keys = self._keys(latent).unflatten(-1, (-1, CHUNK))
        bias = bias.unflatten(-1, (-1, CHUNK))
        highest, total, fade, _, weights = run(
            weigh_keys, few, softcap, query, keys, self.key_base, bias, highest, total, self.turning
        )
        grouped = output.shape[:3]
        sums = times(weights.reshape(*grouped, -1).to(latent.dtype), latent)
        return highest, total, output * fade.reshape(*grouped, 1) + sums

    def _keys(self, latent):
        """Deviations of keys before RoPE (B, G, K, S), halves of pairs side by side."""
        return (self.to_keys @ latent).unflatten(2, (-1, self.key_width)).flatten(1, 2)

    def no_sums(self, query):
        """Weighted sums of nothing, for queries (B, G, Q, K)."""
        groups, size, width, _ = self.to_values.shape
        return query.new_zeros(len(query), groups, size * query.shape[2], width)

    def summed_values(self, sums, weight):
        """Values (B, G, Q, V) of weighted sums, whose weights add up to ``weight`` (B, G, Q, 1)."""
        return super().summed_values(sums, weight) + self.value_base * weight

    def _read_all(self):
        latent = read_latent(torch.float32, self.packed, self.reading)
        keys = self._keys(latent.to(self.product_dtype)).float().mT + self.key_base[:, None]
        if self.order is not None:
            keys = keys[..., self.order.argsort()]
        return keys, self.as_values(latent.mT.unsqueeze(2)) + self.value_base
