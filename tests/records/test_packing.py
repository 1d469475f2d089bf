"""Bytes of packed caches: what plans count is what the cache holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.records.packing import FIELDS, WHOLE_BITS, WIDTHS, bits_of, digits_of, packed_of
from headwise.records.shape import LayerShape
from headwise.runtime.cache import LayerCodes


def test_digits_are_read_as_they_are_written():
    assert digits_of((*WIDTHS, WHOLE_BITS)) == "01234568g"
    assert tuple(bits_of("01234568g")) == (*WIDTHS, WHOLE_BITS)


def test_a_width_has_at_most_two_fields():
    assert all(sum(bool(bits & field) for field in FIELDS) <= 2 for bits in WIDTHS)


@given(st.lists(st.sampled_from((*WIDTHS, WHOLE_BITS)), min_size=2, max_size=40))
def test_bytes_are_those_of_the_cache(widths):
    half = len(widths) // 2
    keys, values = (torch.tensor([part], dtype=torch.uint8) for part in (widths[:half], widths[half:]))
    levels = [torch.ones(*part.shape, 3) for part in (keys, values)]
    constants = [torch.ones(size).half() for size in (9, 9, 3, 3)]
    codes = LayerCodes(keys, values, *levels, *constants, torch.eye(len(widths) - half)[None].half())
    packed = packed_of(widths)
    assert packed.bytes_per_token == codes.bytes_per_token
    assert packed.level_bytes == codes.level_bytes


def test_a_cache_counts_levels_once_and_whole_tokens_for_each_sequence():
    layer = LayerShape(4, 2, 8, 8, packed=packed_of([4] * 32))
    assert layer.token_bytes(2) == 17
    assert layer.cache_bytes(32, 3, 2) == 4 * 32 + 48 + 3 * (32 * 17 + 32 * 2)
    assert layer.cache_bytes(42, 3, 2) == 4 * 32 + 48 + 3 * (32 * 17 + 11 * 32 * 2)  # ten wait to be packed
    assert layer.cache_bytes(0, 1, 2) == 4 * 32 + 48
