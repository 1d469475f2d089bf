"""The packed cache in generate: as an unpacked one of the same numbers would have it."""

import pytest
import torch

from headwise.runtime.cache import PackedCache
from tests.runtime.specs import random_spec
from tests.tiny import tiny

SHAPES = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {"heads": 4, "rotary": 4},
    "phi": {"rotary": 4},
    "gpt2": {"heads": 4, "rotary": 0},
}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt(batch: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_fused_attention_is_unpack_then_attend(name, backend):
    model, spec = tiny(name), random_spec(**SHAPES[name])
    model.set_attn_implementation(backend)
    ids, logits = prompt(2), {}
    for fused in (True, False):
        cache = PackedCache(model, spec, fused=fused)
        with torch.no_grad():
            logits[fused] = [model(part, past_key_values=cache).logits for part in ids.split((5, 3, 1), dim=1)]
    for ours, plain in zip(logits[True], logits[False]):
        assert torch.allclose(ours, plain, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_fine_codes_generate_what_no_codes_do(name):
    model, spec = tiny(name), random_spec(bits=8, **SHAPES[name])
    dense = model.generate(prompt(), **GREEDY)
    cache = PackedCache(model, spec)
    assert torch.equal(model.generate(prompt(), past_key_values=cache, **GREEDY), dense)
    assert torch.equal(model.generate(prompt(), **GREEDY), dense)  # with the attention function still set
    length = cache.get_seq_length()
    assert length == 9 + 11
    shape = {"heads": 2, **SHAPES[name]}
    numbers = shape["heads"] * 16
    expected = 3 * (7 * numbers + 36 + length * numbers + numbers * 4)
    assert cache.nbytes == expected
