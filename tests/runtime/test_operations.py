"""Operations on a packed cache in any order, against plain tensors of the same numbers; what is saved comes back."""

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime import packed_layer, slots
from headwise.runtime.cache import PackedCache
from tests.runtime.specs import random_spec
from tests.tiny import tiny

MODEL = tiny("llama")
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from((1, 2, 7, 300))),
    st.tuples(st.just("crop"), st.sampled_from((1, 3, 290, 1000))),
    st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("select"), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("reset"), st.none()),
)


class Plain:
    """Keys and values of one layer as the packed cache should give them back, in plain tensors."""

    def __init__(self, spec):
        self.spec, self.codes = spec, spec.layers[0]
        self.parts = tuple(torch.zeros(2, 2, 0, 8) for _ in range(4))  # keys and values as given and as rounded
        self.length = self.packed = 0

    @property
    def keys_and_values(self):
        """Rounded as far as they are packed."""
        given, rounded = self.parts[:2], self.parts[2:]
        pairs = zip(given, rounded)
        return [torch.cat((r[:, :, : self.packed], g[:, :, self.packed :]), dim=2) for g, r in pairs]

    def update(self, keys, values):
        frequencies = MODEL.model.rotary_emb.inv_freq
        angles = torch.arange(self.length, self.length + keys.shape[2])[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)
        codes, whole = self.codes, max(self.spec.whole - self.length, 0)

        def turned(x, phase):
            pairs = torch.complex(*x.chunk(2, dim=-1)) * phase
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        before = turned(keys, turn.conj()).transpose(1, 2)
        stored, back = (x.transpose(1, 2) for x in codes.round(before, values.transpose(1, 2)))
        stored = turned(stored, turn)
        stored = torch.cat((keys[:, :, :whole], stored[:, :, whole:]), dim=2)
        back = torch.cat((values[:, :, :whole], back[:, :, whole:]), dim=2)
        new = keys, values, stored, back
        self.parts = tuple(torch.cat(both, dim=2) for both in zip(self.parts, new)) if self.length else new
        self.length = self.parts[0].shape[2]
        self.packed = max(self.packed, self.length // 16 * 16)

    def rearrange(self, change):
        if self.length:
            self.parts = tuple(map(change, self.parts))

    def crop(self, count):
        self.length = max(self.length - count, 0)
        self.packed = min(self.packed, self.length)
        self.parts = tuple(part[:, :, : self.length] for part in self.parts)


def apply(operation, amount, cache, plain, batch, generator):
    """Do one operation to both; returns the rows there are afterwards."""
    rows = torch.randint(0, batch, (batch if operation == "reorder" else max(batch - 1, 1),), generator=generator)
    if operation == "update":
        keys, values = torch.randn(2, batch, 2, amount, 8, generator=generator)
        plain.update(keys, values)
        for number in range(3):
            cache.update(keys, values, number)
    elif operation == "crop":
        cache.crop(-min(amount, plain.length))
        plain.crop(amount)
    elif operation == "reset":
        cache.reset()
        plain.crop(plain.length)
    elif plain.length and operation == "reorder":
        cache.reorder_cache(rows)
        plain.rearrange(lambda t: t[rows])
    elif plain.length and operation == "select":
        cache.batch_select_indices(rows)
        plain.rearrange(lambda t: t[rows])
        return len(rows)
    elif plain.length and operation == "repeat" and batch * amount <= 4:
        cache.batch_repeat_interleave(amount)
        plain.rearrange(lambda t: t.repeat_interleave(amount, dim=0))
        return batch * amount
    return batch


def nearly_all_equal(ours, plain):
    """Rounding may put a number on the other side of a border, seldom."""
    return ours.shape == plain.shape and ((ours - plain).abs() > 1e-5).float().mean() < 1e-3


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATIONS, min_size=2, max_size=9), st.integers(0, 2), st.booleans(), st.integers(0, 2**31))
def test_any_operations_leave_what_plain_tensors_hold(operations, whole, joint, seed):
    generator, batch = torch.Generator().manual_seed(seed), 2
    spec = random_spec(whole=whole, joint=joint)
    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_layer, slots):
            patch.setattr(module, "BLOCK", 512)  # so that a few updates fill one
        cache, plain = PackedCache(MODEL, spec, fused=False), Plain(spec)
        for operation, amount in operations:
            batch = apply(operation, amount, cache, plain, batch, generator)
            assert cache.get_seq_length() == plain.length
            assert cache.get_mask_sizes(3, 0) == (plain.length + 3, 0)
            if plain.length:
                keys, values = cache.layers[0].unpacked()
                assert all(map(nearly_all_equal, (keys, values), plain.keys_and_values))
            exact = min(plain.length, whole) + plain.length - plain.packed
            a_row = plain.packed * sum(c.bytes_per_token for c in spec.layers.values()) + exact * 3 * 32 * 4
            assert cache.nbytes == 3 * (4 * 32 + 48) + (batch * a_row if plain.length else 0)


def filled(spec, seed=0, tokens=600):
    cache = PackedCache(MODEL, spec)
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        MODEL(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=cache)
    return cache, torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)


@pytest.mark.parametrize(("layers", "joint"), [(3, False), (2, False), (3, True)])
def test_a_saved_prefix_goes_on_as_if_never_saved(tmp_path, layers, joint):
    spec = random_spec(layers=layers, joint=joint)  # with two, the third layer is a plain one
    cache, mask = filled(spec)
    cache.save(tmp_path / "prefix.safetensors")
    loaded = PackedCache.load(tmp_path / "prefix.safetensors", MODEL, spec)
    assert (loaded.get_seq_length(), loaded.nbytes) == (600, cache.nbytes)
    inputs = {"attention_mask": mask, "position_ids": torch.tensor([[600], [595]])}
    with torch.no_grad():
        results = [MODEL(torch.tensor([[7], [8]]), past_key_values=c, **inputs).logits for c in (cache, loaded)]
    assert torch.equal(*results)
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.safetensors"]


def test_a_prefix_of_other_weights_or_codes_is_refused(tmp_path):
    spec = random_spec()
    path = tmp_path / "prefix.safetensors"
    filled(spec, tokens=9)[0].save(path)
    other = random_spec()
    other.fingerprint = "cd" * 32
    for wrong in (other, random_spec(bits=4)):
        with pytest.raises(ValueError, match="saved for another model or other codes"):
            PackedCache.load(path, MODEL, wrong)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a safetensors file"):
        PackedCache.load(path, MODEL, spec)


def test_killed_while_saving_leaves_the_old_file(tmp_path):
    path, content = tmp_path / "prefix.safetensors", "bytes(64_000_000)"
    path.write_bytes(b"old")
    code = "import pathlib, sys\nfrom headwise.runtime import packing\nimport os\nos.fsync = lambda _: input()\n"
    code += f"packing.write_bytes(pathlib.Path(sys.argv[1]), {content})"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE)
    while not any(tmp_path.glob(".prefix*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert path.read_bytes() == b"old"


def test_what_cannot_be_packed_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="Layer 0 of MistralForCausalLM keeps a DynamicSlidingWindowLayer"):
        PackedCache(tiny("mistral"), random_spec())
    with pytest.raises(ValueError, match="has an encoder and a decoder"):
        PackedCache(tiny("whisper"), random_spec())
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="turns depend on the position alone"):
        PackedCache(tiny("llama", rope_parameters=rope), random_spec())
    with pytest.raises(ValueError, match="for a layer 3, but the cache of LlamaForCausalLM has 3"):
        PackedCache(MODEL, random_spec(layers=4))
    with pytest.raises(ValueError, match="for RoPE on 4 coordinates; LlamaForCausalLM turns 8"):
        PackedCache(MODEL, random_spec(rotary=4))
    with pytest.raises(ValueError, match=r"keys and values come as \(2, 8\) and \(2, 8\): they are another model's"):
        PackedCache(MODEL, random_spec(heads=3), fused=False).update(*torch.zeros(2, 1, 2, 4, 8), 0)
    with pytest.raises(ValueError, match="positions that rise by one"), torch.no_grad():
        MODEL(
            torch.ones(1, 3).long(),
            position_ids=torch.tensor([[0, 2, 3]]),
            past_key_values=PackedCache(MODEL, random_spec()),
        )


def test_attention_that_ignores_the_packed_keys_is_noticed():
    cache = PackedCache(MODEL, random_spec())
    cache.update(*torch.zeros(2, 1, 2, 4, 8), 0)
    with pytest.raises(ValueError, match="did not read the packed keys"):
        cache.update(*torch.zeros(2, 1, 2, 1, 8), 0)
