"""Codes: nearest levels, packed into bytes and back, and the file that says how."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headwise.runtime.packing import (
    WHOLE_BITS,
    WIDTHS,
    Evening,
    decode,
    encode,
    one_entry,
    pack,
    read_spec,
    round_trip,
    unpack,
    write_spec,
)
from tests.runtime.specs import random_codes, random_spec


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from((*WIDTHS, WHOLE_BITS)), min_size=1, max_size=40), st.integers(0, 2**31))
def test_codes_of_any_widths_come_back_from_their_bytes(widths, seed):
    bits = torch.tensor(widths)
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.rand(2, len(widths), 5, generator=generator) * (1 << bits)[:, None]).int()
    packed = pack(codes, bits)
    count = {size: sum((w == 8) == (size == 8) and w & size > 0 for w in widths) for size in (8, 4, 2, 1)}
    count[8] += 2 * widths.count(WHOLE_BITS)
    expected = count[8] + -(-count[4] // 2) + -(-count[2] // 4) + -(-count[1] // 8)
    assert packed.shape == (2, max(expected, 1), 5)
    assert torch.equal(unpack(packed, bits).int(), codes)


def level_table(bits, levels):
    """The number that each code of each coordinate stands for; infinite where there is none."""
    top = (1 << bits.long()).unsqueeze(-1) - 1
    codes = torch.arange(int(top.max()) + 1)
    u = (2 * codes - top) / top.clamp(min=1)
    offset, scale, cubic = levels.float().unsqueeze(-2).unbind(-1)
    return (offset + scale * (u + cubic * u**3)).masked_fill(codes > top, math.inf)


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
    evening, offset = Evening(codes.keys), codes.key_levels[..., 0]
    beside = x.detach().float() - offset
    loud = evening.loudness(evening.codes(beside.flatten(-2))).unflatten(-1, (2, 16))
    expected = offset + (decode(encode(offset + beside / loud, *parts), *parts, codes.key_gain) - offset) * loud
    assert torch.allclose(y.float(), expected, atol=1e-6 if dtype == torch.float32 else 0.05)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_are_rounded_as_coordinates_that_a_group_of_heads_shares(groups):
    torch.manual_seed(0)
    codes = random_codes(4, 4, 6, bits=8, groups=groups)
    codes = dataclasses.replace(codes, value_gain=torch.ones(9).half())
    values = torch.randn(3, 5, 4, 6).requires_grad_()
    keys = torch.zeros(3, 5, 4, 4)
    _, rounded = codes.round(keys, values)
    assert 0 < (rounded - values).abs().mean() < 0.05
    heads = 4 // groups
    for group in range(groups):
        z = values.detach()[:, :, group * heads : (group + 1) * heads].flatten(2)
        z = torch.linalg.solve(codes.value_map[group].double(), z.double().mT).mT.float()
        only = [t[group : group + 1] if t.ndim > 1 else t for t in codes.values]
        if groups == 1:
            expected = round_trip(z.unsqueeze(-2), *only).squeeze(-2) @ codes.value_map[group].float().T
            assert torch.allclose(rounded.flatten(2), expected, atol=1e-5)
    (rounded * 2).sum().backward()
    assert torch.equal(values.grad, torch.full_like(values, 2))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_joint_latent_gives_back_keys_and_values(groups):
    torch.manual_seed(0)
    codes = random_codes(4, 4, 6, bits=8, groups=groups, joint=True)
    codes = dataclasses.replace(codes, value_gain=torch.ones(9).half())
    keys, values = (torch.randn(3, 5, 4, width).requires_grad_() for width in (4, 6))
    rounded = codes.round(keys, values)
    assert codes.joint and codes.bits.numel() == 4 * (4 + 6)
    for whole, back in zip((keys, values), rounded):
        assert 0 < (back - whole).abs().mean() < 0.05
    (2 * rounded[0]).sum().backward()
    assert torch.equal(keys.grad, torch.full_like(keys, 2))
    coarse = dataclasses.replace(codes, value_bits=torch.zeros_like(codes.value_bits))
    moved = coarse.round(keys, values)[0]
    assert torch.allclose(moved[0, 0], moved[2, 4], atol=1e-5)  # nothing of a token is left


def test_a_token_as_loud_as_its_code_says_is_evened_out():
    codes = random_codes(2, 16, 8, bits=4)
    low, step, factor = codes.key_loudness.float()
    offset, scale, _ = codes.key_levels.float().unbind(-1)
    sizes = (low + step * torch.arange(-2, 18)).square()  # beyond either end too
    x = offset + (sizes / factor)[:, None, None] * scale * torch.randn(20, 2, 16).sign()
    evening = Evening(codes.keys)
    loud = evening.codes((x - offset).flatten(-2))
    assert loud.flatten().tolist() == [0, 0, *range(16), 15, 15]
    assert torch.allclose(evening.loudness(loud)[2:18], sizes[2:18, None].expand(16, 32), rtol=1e-4)


def test_a_spec_comes_back_from_its_file(tmp_path):
    spec = random_spec(whole=2)
    write_spec(tmp_path / "cache.safetensors", spec)
    read = read_spec(tmp_path / "cache.safetensors")
    assert (read.whole, read.rotary, read.interleaved, read.fingerprint) == (2, 8, False, "ab" * 32)
    assert read.digest == spec.digest and list(read.layers) == [0, 1, 2]
    assert read.layers[1].level_bytes == 4 * 2 * 16 + 48
    for one, other in zip(vars(read.layers[2]).values(), vars(spec.layers[2]).values(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"0.key_bits": torch.full((2, 8), 7, dtype=torch.uint8)}, "layer 0: key_bits other than 0, 1, 2"),
        ({"0.key_bits": torch.ones(2, 8)}, "layer 0: key_bits is torch.float32"),
        ({"1.value_offsets": torch.full((1, 16), torch.nan).half()}, "layer 1: value_offsets is not finite"),
        ({"1.value_offsets": torch.ones(1, 15).half()}, r"offsets \(1, 15\) and gain \(9,\) do not fit"),
        ({"1.value_map": torch.ones(2, 8, 8).half()}, "layer 1: value_map .* does not fit 1 groups of 16 coordinates"),
        ({"1.value_map": torch.zeros(1, 16, 16).half()}, "layer 1: value_map cannot be inverted"),
        ({"1.key_bits": torch.zeros(3, 8, dtype=torch.uint8)}, "do not fit"),
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
    metadata = {"format": "headwise-cache", "version": "3", "whole": "1", "rotary": "8", "interleaved": "false"}
    metadata["fingerprint"] = spec.fingerprint
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, one_entry(metadata))
    with pytest.raises(ValueError, match=sentence):
        read_spec(path)
    save_file(load_file(path), path, one_entry({**metadata, "version": "2"}))
    with pytest.raises(ValueError, match="not a headwise-cache file of version 3"):
        read_spec(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_spec(path)
