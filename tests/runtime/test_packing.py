"""Codes: nearest levels, packed into bytes and back, and the file that says how."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headwise.runtime.packing import (
    WIDTHS,
    decode,
    encode,
    evened,
    level_table,
    one_entry,
    pack,
    read_spec,
    round_trip,
    unpack,
    write_spec,
)
from tests.runtime.specs import random_codes, random_spec


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=40), st.integers(0, 2**31))
def test_codes_of_any_widths_come_back_from_their_bytes(widths, seed):
    bits = torch.tensor(widths)
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.rand(2, len(widths), 5, generator=generator) * (1 << bits)[:, None]).to(torch.uint8)
    packed = pack(codes, bits)
    count = {size: sum((w == 8) == (size == 8) and w & size > 0 for w in widths) for size in (8, 4, 2, 1)}
    expected = count[8] + -(-count[4] // 2) + -(-count[2] // 4) + -(-count[1] // 8)
    assert packed.shape == (2, max(expected, 1), 5)
    assert torch.equal(unpack(packed, bits), codes)


def test_codes_are_those_of_the_nearest_levels():
    codes = random_codes(3, 40, 8)
    bits, levels = codes.key_bits, codes.key_levels
    x = 3 * torch.randn(2, 7, 3, 40)
    table = level_table(bits, levels)
    best = (x[..., None] - table).abs().argmin(-1)
    assert torch.equal(encode(x, bits, levels).long(), best)
    plain = decode(encode(x, bits, levels), bits, levels, torch.ones(9))
    assert torch.allclose(plain, table.expand(2, 7, -1, -1, -1).gather(-1, best[..., None])[..., 0], atol=1e-6)


def test_the_gain_widens_what_is_beside_the_offset():
    codes = random_codes(2, 16, 8)
    bits, levels, gain = codes.key_bits, codes.key_levels, codes.key_gain
    x = torch.randn(1, 5, 2, 16)
    plain = decode(encode(x, bits, levels), bits, levels, torch.ones(9))
    offset = levels[..., 0].float()
    expected = offset + (plain - offset) * gain.float()[bits.long()]
    assert torch.allclose(decode(encode(x, bits, levels), bits, levels, gain), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_gives_what_the_codes_give_and_lets_gradients_pass(dtype):
    codes = random_codes(2, 16, 8)
    parts = codes.key_bits, codes.key_levels
    x = torch.randn(2, 5, 2, 16).to(dtype).requires_grad_()
    y = round_trip(x, *codes.keys)
    assert y.dtype == dtype and y.shape == x.shape
    even, loud = evened(x, *parts, codes.key_loudness)
    low, step, _ = codes.key_loudness.float()
    offset = codes.key_levels[..., 0].float()
    beside = decode(encode(even, *parts), *parts, codes.key_gain) - offset
    expected = offset + beside * (low + step * loud).square()[..., None, None]
    assert torch.allclose(y.float(), expected, atol=1e-6 if dtype == torch.float32 else 0.05)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_a_token_as_loud_as_its_code_says_is_evened_out():
    codes = random_codes(2, 16, 8, bits=4)
    low, step, factor = codes.key_loudness.float()
    offset, scale, _ = codes.key_levels.float().unbind(-1)
    sizes = (low + step * torch.arange(-2, 18)).square()  # beyond either end too
    x = offset + (sizes / factor)[:, None, None] * scale * torch.randn(20, 2, 16).sign()
    even, loud = evened(x, codes.key_bits, codes.key_levels, codes.key_loudness)
    assert loud.tolist() == [0, 0, *range(16), 15, 15]
    assert torch.allclose((even - offset)[2:18].abs() / scale, (1 / factor).expand(16, 2, 16), rtol=1e-4)


def test_a_spec_comes_back_from_its_file(tmp_path):
    spec = random_spec(whole=2)
    write_spec(tmp_path / "cache.safetensors", spec)
    read = read_spec(tmp_path / "cache.safetensors")
    assert (read.whole, read.rotary, read.interleaved, read.fingerprint) == (2, 8, False, "ab" * 32)
    assert read.digest == spec.digest and list(read.layers) == [0, 1, 2]
    assert read.layers[1].parameter_bytes == 7 * 2 * 16 + 48
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"0.key_bits": torch.full((2, 8), 7, dtype=torch.uint8)}, "layer 0: key_bits other than 0, 1, 2"),
        ({"0.key_bits": torch.ones(2, 8)}, "layer 0: key_bits is torch.float32"),
        ({"1.value_levels": torch.full((2, 8, 3), torch.nan).half()}, "layer 1: value_levels is not finite"),
        ({"1.value_levels": torch.ones(2, 7, 3).half()}, r"value_levels \(2, 7, 3\) and gain \(9,\) do not fit"),
        ({"1.value_levels": -torch.ones(2, 8, 3).half()}, "value_levels that fall"),
        ({"2.key_gain": torch.ones(8).half()}, "do not fit"),
        ({"2.key_loudness": torch.zeros(3).half()}, "layer 2: key_loudness is not three positive numbers"),
        ({"2.key_gain": None}, "layer 2: key_gain missing"),
        ({"x.key_gain": torch.ones(9).half()}, "holds a tensor 'x.key_gain'"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, change, sentence):
    path = tmp_path / "cache.safetensors"
    spec = dataclasses.replace(random_spec(), layers={i: random_codes(2, 8, 8, 4, seed=i) for i in range(3)})
    write_spec(path, spec)
    tensors = {**load_file(path), **change}
    metadata = {"format": "headwise-cache", "version": "2", "whole": "1", "rotary": "8", "interleaved": "false"}
    metadata["fingerprint"] = spec.fingerprint
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, one_entry(metadata))
    with pytest.raises(ValueError, match=sentence):
        read_spec(path)
    save_file(load_file(path), path, one_entry({**metadata, "version": "1"}))
    with pytest.raises(ValueError, match="not a headwise-cache file of version 2"):
        read_spec(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_spec(path)
