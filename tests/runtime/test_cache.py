"""The packed cache in generate: as an unpacked one of the same numbers would have it."""

import dataclasses

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from headwise.runtime import packed_attention
from headwise.runtime.cache import PackedCache, encode, unpack
from headwise.runtime.packing import Evening
from tests.runtime.specs import random_spec
from tests.tiny import tiny

SHAPES = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {"heads": 4, "rotary": 4},
    "phi": {"rotary": 4},
    "gpt2": {"heads": 4, "rotary": 0},
}
JOINT = ("llama", "gpt_neox", "gpt2")
CASES = [*((name, {}) for name in SHAPES), *((name, {"joint": True, "groups": 2}) for name in JOINT)]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt(batch: int = 1, tokens: int = 40) -> torch.Tensor:
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_fused_attention_is_unpack_then_attend(name, form, backend):
    model, spec = tiny(name), random_spec(**SHAPES[name], **form)
    model.set_attn_implementation(backend)
    ids, logits = prompt(2), {}
    for fused in (True, False):
        cache = PackedCache(model, spec, fused=fused)
        with torch.no_grad():
            logits[fused] = [model(part, past_key_values=cache).logits for part in ids.split((30, 9, 1), dim=1)]
    for ours, plain in zip(logits[True], logits[False]):
        assert torch.allclose(ours, plain, atol=1e-5)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_fine_codes_generate_what_no_codes_do(name, form):
    model, spec = tiny(name), random_spec(bits=8, **SHAPES[name], **form)
    ids = prompt(tokens=9)
    dense = model.generate(ids, **GREEDY)
    cache = PackedCache(model, spec)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), dense)
    assert torch.equal(model.generate(ids, **GREEDY), dense)  # with the attention function still set
    length = cache.get_seq_length()
    assert length == 9 + 11
    shape = {"heads": 2, **SHAPES[name]}
    numbers = shape["heads"] * 16
    loud = 1  # a byte, of a joint latent half of it
    expected = 3 * (4 * numbers + 48 + 16 * (numbers + loud) + (1 + length - 16) * numbers * 4)
    assert cache.nbytes == expected


def reference(model, spec, ids, tokens=12):
    """Greedy tokens with all keys and values unpacked at every step."""
    return model.generate(
        ids, past_key_values=PackedCache(model, spec, fused=False), **{**GREEDY, "max_new_tokens": tokens}
    )


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", JOINT)
def test_left_padding_changes_nothing(name, joint):
    model, spec = tiny(name), random_spec(**SHAPES[name], joint=joint)
    long, short = prompt(1, 25), prompt(1, 9) + 1  # so that the same tokens of both are packed together
    ids = torch.cat((long, torch.cat((torch.zeros(1, 16, dtype=torch.long), short), dim=1)))
    mask = (ids != 0).long()
    both = model.generate(ids, attention_mask=mask, past_key_values=PackedCache(model, spec), **GREEDY)
    for row, alone in zip(both, (long, short)):
        assert torch.equal(row[25:], reference(model, spec, alone)[0, alone.shape[1] :])


def test_rows_that_begin_in_a_later_part_of_the_prompt_are_stored_as_alone():
    model, spec = tiny("llama"), random_spec()
    short = prompt(1, 20) + 1
    ids = torch.cat((prompt(1, 36), torch.cat((torch.zeros(1, 16, dtype=torch.long), short), dim=1)))
    mask = (ids != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, alone, done = PackedCache(model, spec), PackedCache(model, spec), 0
    with torch.no_grad():
        for part in ids.split(5, dim=1):
            here = slice(done, done + part.shape[1])
            done = here.stop
            inputs = {"attention_mask": mask[:, :done], "position_ids": positions[:, here]}
            model(part, past_key_values=cache, **inputs)
        model(short, past_key_values=alone)
    ours, expected = cache.layers[0], alone.layers[0]  # of the first layer: what it stores depends on no attention
    assert torch.equal(ours.packed[1:, :, 16:], expected.packed)
    assert torch.allclose(ours.whole_keys[1:, :, :5], expected.whole_keys[:, :, :5])
    assert cache.padding.tolist() == cache.ahead.tolist() == [0, 16]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_beams_are_those_of_unpacked_numbers(sampled, joint):
    model, spec = tiny("llama"), random_spec(joint=joint)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 3, "do_sample": sampled}
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        results.append(model.generate(prompt(2), past_key_values=PackedCache(model, spec, fused=fused), **options))
    assert torch.equal(*results)


def test_assisted_decoding_gives_what_plain_decoding_gives():
    model, spec = tiny("llama"), random_spec()
    plain = model.generate(prompt(), past_key_values=PackedCache(model, spec), **GREEDY)
    for helper in ({"assistant_model": tiny("llama", num_hidden_layers=1)}, {"prompt_lookup_num_tokens": 3}):
        assisted = model.generate(prompt(), past_key_values=PackedCache(model, spec), **GREEDY, **helper)
        assert torch.equal(assisted, plain)


def test_sampling_follows_the_seed():
    model, spec = tiny("llama"), random_spec()
    results = []
    for fused in (True, False):
        torch.manual_seed(3)
        cache = PackedCache(model, spec, fused=fused)
        results.append(model.generate(prompt(2), past_key_values=cache, **{**GREEDY, "do_sample": True}))
    assert torch.equal(*results)


def test_compiled_models_read_the_cache_too():
    model, spec = tiny("llama"), random_spec()
    expected = reference(model, spec, prompt(), tokens=4)
    cache = PackedCache(model, spec)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        assert torch.equal(model.generate(prompt(), past_key_values=cache, **{**GREEDY, "max_new_tokens": 4}), expected)
    torch.compiler.reset()


def logits_in_parts(model, spec, fused, parts=(590, 1, 1, 4)):
    cache, ids = PackedCache(model, spec, fused=fused), prompt(1, 600)
    with torch.no_grad():
        return [model(part, past_key_values=cache).logits for part in ids.split((*parts, 600 - sum(parts)), dim=1)]


@pytest.mark.parametrize(
    ("parts", "joint"),
    [((598, 1), False), ((598, 1), True), pytest.param((590, 3, 4), False, marks=pytest.mark.slow)],
)
def test_compiled_attention_is_unpack_then_attend(parts, joint, monkeypatch):
    monkeypatch.setattr(packed_attention, "COMPILE_FROM", 1)
    monkeypatch.setattr(packed_attention, "COMPILED", {})
    model = tiny("gpt_neox", max_position_embeddings=1024)
    spec = random_spec(**SHAPES["gpt_neox"], joint=joint)
    for ours, plain in zip(logits_in_parts(model, spec, True, parts), logits_in_parts(model, spec, False, parts)):
        assert torch.allclose(ours, plain, atol=1e-5)
    assert len(packed_attention.COMPILED) == 2 and "impossible" not in packed_attention.COMPILED


def test_without_a_compiler_attention_runs_as_it_is_and_says_so_once(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(packed_attention, "COMPILE_FROM", 1)
    monkeypatch.setattr(packed_attention, "COMPILED", {})
    monkeypatch.setattr(torch, "compile", no_compiler)
    model, spec = tiny("llama", max_position_embeddings=1024), random_spec()
    with pytest.warns(UserWarning, match="runs uncompiled, which is slower: no compiler$") as caught:
        ours = logits_in_parts(model, spec, True)
    assert len(caught) == 1
    for logits, plain in zip(ours, logits_in_parts(model, spec, False)):
        assert torch.allclose(logits, plain, atol=1e-5)


def test_a_prefix_read_in_inference_mode_goes_on_in_any():
    model, spec = tiny("llama"), random_spec()
    ids, results = prompt(2), []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = PackedCache(model, spec)
        with mode():
            model(ids[:, :-1], past_key_values=cache)
        results.append(model.generate(ids, past_key_values=cache, **GREEDY))
    assert torch.equal(*results)
    cache.crop(-3)
    assert not model(ids, past_key_values=cache).logits.isnan().any()  # with gradients
    assert not any(block.requires_grad for layer in cache.layers for block in (*layer.blocks, layer.whole_keys))


def test_capped_logits_are_capped_in_packed_ones_too():
    model = tiny("gemma2", layer_types=["full_attention"] * 3, attn_logit_softcapping=1.0)
    logits = []
    for fused in (True, False):
        cache = PackedCache(model, random_spec(), fused=fused)
        with torch.no_grad():
            logits.append([model(part, past_key_values=cache).logits for part in prompt().split((30, 9, 1), dim=1)])
    for ours, plain in zip(*logits):
        assert torch.allclose(ours, plain, atol=1e-5)


def test_attention_with_sinks_is_refused():
    model = tiny("llama")
    cache, module = PackedCache(model, random_spec()), model.model.layers[0].self_attn
    for tokens in (3, 1):
        key, value = cache.update(*torch.zeros(2, 1, 2, tokens, 8), 0)
        query, options = torch.zeros(1, 4, tokens, 8), {"scaling": 1.0, "s_aux": torch.zeros(4)}
        if tokens == 1:
            with pytest.raises(ValueError, match="adds s_aux to its logits"):
                packed_attention.packed_attention(module, query, key, value, None, **options)
        else:
            packed_attention.packed_attention(module, query, key, value, None, scaling=1.0)


def cohere():
    """A tiny model whose RoPE turns pairs of neighbours."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**sizes, num_key_value_heads=2, vocab_size=97, pad_token_id=0)).eval()


def test_pairs_of_neighbours_come_out_of_a_joint_latent():
    model, ids = cohere(), prompt(1, 36)
    spec, logits = random_spec(interleaved=True, joint=True, bits=8), []
    for number, codes in spec.layers.items():
        spec.layers[number] = dataclasses.replace(codes, value_gain=torch.ones(9).half())
    for fused in (True, False):
        cache = PackedCache(model, spec, fused=fused)
        with torch.no_grad():
            logits.append([model(part, past_key_values=cache).logits for part in ids.split((20, 15, 1), dim=1)])
    for ours, plain in zip(*logits):
        assert torch.allclose(ours, plain, atol=1e-5)
    assert torch.allclose(logits[0][2], model(ids).logits[:, -1:], atol=2e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_stored_as_they_are_before_rope(interleaved):
    model, spec = cohere() if interleaved else tiny("llama"), random_spec(interleaved=interleaved)
    before, ids, logits = [], prompt(1, 36), []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, given, keys: before.append(keys))
    for fused in (True, False):
        cache = PackedCache(model, spec, fused=fused)
        with torch.no_grad():
            logits.append([model(part, past_key_values=cache).logits for part in ids.split((20, 15, 1), dim=1)])
    for ours, plain in zip(*logits):
        assert torch.allclose(ours, plain, atol=1e-5)
    codes, packed = spec.layers[0], cache.layers[0].packed
    keys = torch.cat(before[-3:], dim=1).unflatten(-1, (2, 8))
    evening, offset = Evening(codes.keys), codes.key_levels[..., 0]
    beside = keys - offset
    even = beside / evening.loudness(evening.codes(beside.flatten(2))).unflatten(2, (2, 8))
    expected = encode(offset + even, codes.key_bits, codes.key_levels).flatten(2).transpose(1, 2)[..., :32]
    assert (unpack(packed, codes.stored_bits)[:, :16] == expected).float().mean() > 0.98  # but for roundings at borders
