"""Per-layer models take the packed cache that lies beside their weights, with and without headwise installed."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import headwise as hw
from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced
from headwise.runtime.cache import CacheSpec, PackedCache, write_spec
from tests.runtime.specs import random_codes
from tests.tiny import tiny

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.randint(3, 97, (2, 27), generator=torch.Generator().manual_seed(0))


def codes_for(model, bits=None):
    layers = [layer for layer in model.config.headwise["layers"] if layer["heads"]]
    codes = {e["slot"]: random_codes(e["kv_heads"], e["qk_dim"], e["v_dim"], bits, seed=e["slot"]) for e in layers}
    return CacheSpec(codes, whole=1, rotary=8, fingerprint=fingerprint(model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A per-layer model whose layers differ, one without attention, with codes beside the weights."""
    out = tmp_path_factory.mktemp("packed") / "out"
    model = tiny("llama")
    shape = shape_of(model)
    narrow = LayerPlan(4, 2, 4, 5, rope_pairs=((0, 2), (3, 1)))
    plan = Plan.make(shape, (narrow, LayerPlan(0, 0, 0, 0), LayerPlan.full(shape.layers[2])))
    reduced = build_reduced(model, plan)
    save_student(reduced, out, plan=plan, source="")
    write_spec(out / "cache.safetensors", codes_for(reduced))
    return out


def test_generate_takes_the_codes_beside_the_weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    result = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert type(result.past_key_values) is PackedCache
    spec = codes_for(model)
    plain = model.generate(IDS, past_key_values=PackedCache(model, spec, fused=False), **GREEDY)
    assert torch.equal(result.sequences, plain)
    expected = sum(c.level_bytes + 2 * 32 * c.bytes_per_token for c in spec.layers.values())
    expected += sum(2 * 3 * 4 * (c.key_bits.numel() + c.value_bits.numel()) for c in spec.layers.values())
    assert result.past_key_values.nbytes == expected


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_other_caches_work_as_before(folder, backend):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=backend)
    dense = [
        model.generate(IDS, past_key_values=DynamicCache(config=model.config), **GREEDY),
        model.generate(IDS, use_cache=False, **GREEDY),
    ]
    model.generate(IDS, **GREEDY)
    assert model.config._attn_implementation.startswith("headwise_packed")
    again = model.generate(IDS, past_key_values=DynamicCache(config=model.config), **GREEDY)
    assert torch.equal(again, dense[0])
    assert torch.equal(model.generate(IDS, use_cache=False, **GREEDY), dense[1])
    with torch.no_grad():
        ours = model(IDS).logits
        model.set_attn_implementation(backend)
        assert torch.equal(ours, model(IDS).logits)


def test_the_files_beside_the_weights_are_enough(folder, tmp_path):
    code = (
        "import sys, json, torch\n"
        "sys.modules['headwise'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        f"result = model.generate(torch.tensor({IDS.tolist()}), return_dict_in_generate=True, **{GREEDY})\n"
        "print(json.dumps([type(result.past_key_values).__module__, result.sequences.tolist()]))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    module, tokens = json.loads(process.stdout.strip().splitlines()[-1])
    assert module.startswith("transformers_modules.") and module.endswith(".cache")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokens == model.generate(IDS, **GREEDY).tolist()


def test_hw_cache_finds_the_codes_or_says_what_is_missing(folder, tmp_path):
    model = hw.open(folder, device="cpu")
    cache = hw.cache(model)
    assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), model.generate(IDS, **GREEDY))
    tiny("llama").save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(hw.InputError, match=r"where there is no cache\.safetensors: compress it with bits"):
        hw.cache(stock)
    spec = CacheSpec({7: random_codes(2, 8, 8)}, rotary=8, fingerprint=fingerprint(stock))
    write_spec(tmp_path / "cache.safetensors", spec)
    with pytest.raises(hw.InputError, match="for a layer 7, but the cache of LlamaForCausalLM has 3"):
        hw.cache(stock)
    write_spec(tmp_path / "cache.safetensors", replace(spec, layers={0: random_codes(2, 8, 8)}))
    for dtype in (torch.float16, torch.bfloat16):
        assert (
            hw.cache(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)).spec.fingerprint == spec.fingerprint
        )
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(hw.InputError, match="is of another model"):
        hw.cache(other)
    write_spec(tmp_path / "cache.safetensors", replace(spec, fingerprint="ab" * 32))
    with pytest.raises(hw.InputError, match="is of another model"):
        hw.cache(stock)
    (tmp_path / "cache.safetensors").write_bytes(b"nothing")
    with pytest.raises(hw.InputError, match="not a safetensors file"):
        hw.cache(stock)
