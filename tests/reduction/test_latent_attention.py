"""Latent attention (MLA): its cache in coordinates of its own, rounded, read back, saved; its weights left alone."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import headwise as hw
from headwise.checkpoints.origin import made_by_headwise
from headwise.checkpoints.packed import cache as packed_cache
from headwise.checkpoints.packed import codes_of
from headwise.files.errors import InputError
from headwise.planning.menus import MenuRequest
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.reduction.bits.change import Bits
from headwise.reduction.bits.options import options
from headwise.reduction.build import build_reduced
from headwise.reduction.latent.change import Latent
from headwise.reduction.plans import plan_for
from headwise.runtime.cache import PackedCache
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding
from tests.reduction.conftest import inputs
from tests.tiny import LATENT_MODELS, tiny

KINDS = {name: (name, {}) for name in LATENT_MODELS} | {
    "in halves, with biases": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": 12, "attention_bias": True})
}


@pytest.fixture(scope="module", params=KINDS)
def measured(request):
    name, changes = KINDS[request.param]
    model = tiny(name, **changes)
    return model, hw.inspect(model, inputs=inputs(), config=hw.InspectConfig(tokens=512, maps=False), checks=False)


def everywhere(profile, digit):
    """As many bits for every coordinate of every layer."""
    widths = [(layer.cached.qk_dim, layer.cached.v_dim) for layer in profile.shape.layers]
    return Plan.make(profile.shape, [Bits((digit * K,), (digit * V,)) for K, V in widths])


def reduced(measured, share=None, digit=None):
    model, profile = measured
    plan = everywhere(profile, digit) if share is None else plan_for(profile, Budget("keep_kv", share, 4096), cache="mixed")  # fmt: skip  # noqa: E501
    return hw.compress(model, plan, profile)


def decoded(model, ids, cache, first=20, **given):
    """Logits of ``ids`` read through ``cache``: the first ones at once, then one by one."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    logits = []
    for start, stop in ((0, first), *((t, t + 1) for t in range(first, ids.shape[1]))):
        part = {} if mask is None else {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        with torch.no_grad():
            logits.append(model(ids[:, start:stop], past_key_values=cache, **part).logits)
    return torch.cat(logits, dim=1)


def test_bases_in_the_weights_change_nothing(measured):
    model, profile = measured
    plan = plan_for(profile, Budget("keep_kv", 0.3, 4096), cache="mixed")
    assert {type(change) for changes in plan.layers for change in changes} == {Bits}
    small = hw.compress(model, plan, profile)
    assert type(small) is type(model)
    ids = inputs()[0]["input_ids"]
    with torch.no_grad():
        assert (model(ids).logits - small(ids).logits).abs().max() < 1e-5
    turned, before = (one.model.layers[0].self_attn.kv_a_proj_with_mqa.weight for one in (small, model))
    rank = profile.shape.layers[0].latent.kv_rank
    assert torch.equal(turned[:rank], before[:rank]) and not torch.allclose(turned[rank:], before[rank:], atol=1e-3)
    assert hw.shape_of(small) == hw.shape_of(model).planned(plan)


def test_turned_pairs_of_the_shared_key_no_longer_vary_together(measured):
    """Which coordinates make a pair, and where they are cached, is right: their covariance is gone."""
    small, correlations = reduced(measured, 0.3), []
    ids = torch.cat([batch["input_ids"] for batch in inputs()])
    for one in (measured[0], small):
        cache = DynamicCache(config=one.config)
        with torch.no_grad():
            one(ids, position_ids=torch.zeros_like(ids), past_key_values=cache)  # where RoPE turns nothing
        keys = cache.layers[0].values[:, 0, 1:].flatten(0, 1)
        pairs = keys.view(len(keys), -1, 2) if codes_of(small).interleaved else keys.view(len(keys), 2, -1).mT
        correlations.append(max(torch.corrcoef(pairs[:, p].T)[0, 1].abs().item() for p in range(pairs.shape[1])))
    assert correlations[1] < 0.03 < correlations[0]


def test_eight_bits_are_nearly_the_model_and_sixteen_are_it(measured):
    model, _ = measured
    ids = inputs()[0]["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
    for digit, noise in (("8", 2e-2), ("g", 1e-3)):
        small = reduced(measured, digit=digit)
        assert (decoded(small, ids, packed_cache(small)) - expected).abs().max() < noise
        with torch.no_grad(), rounding(small, codes_of(small)):
            assert (small(ids).logits - expected).abs().max() < noise


def test_the_cache_gives_back_what_rounding_reads(measured):
    small = reduced(measured, 0.3)
    ids = inputs()[0]["input_ids"][:, :32]
    plain, packed = DynamicCache(config=small.config), packed_cache(small)
    exact = DynamicCache(config=small.config)
    with torch.no_grad():
        small(ids, past_key_values=exact)
        small(ids, past_key_values=packed)
        with rounding(small, codes_of(small)):
            small(ids, past_key_values=plain)
    read = packed.layers[0].unpacked()  # of the first layer, in front of which nothing is rounded
    for name, unpacked in zip(("values", "keys"), read, strict=True):
        own, whole = (getattr(one.layers[0], name) for one in (plain, exact))
        torch.testing.assert_close(unpacked, own, rtol=1e-4, atol=1e-5)
        assert (own - whole)[:, :, 1:].abs().max() > 1e-3
        torch.testing.assert_close(own[:, :, 0], whole[:, :, 0])


def test_more_bits_are_nearer(measured):
    model, profile = measured
    held_out, distances = profile.held_out(), []
    for share in (0.5, 0.3, 0.15):
        small = reduced(measured, share)
        with rounding(small, codes_of(small)):
            distances.append(measure_distance(model, small, held_out).divergence)
    assert distances == sorted(distances)
    assert 8 * distances[0] < distances[-1]


def test_coordinates_without_bits_are_cut(measured):
    """A narrower latent without another weight."""
    _, profile = measured
    cut = Bits(("4444",), ("8" * 6 + "0" * 4,))
    small = reduced((measured[0], profile), digit="8")
    narrow = hw.compress(measured[0], Plan.make(profile.shape, [cut] * 3), profile)
    assert codes_of(narrow).layers[0].bytes_per_token < codes_of(small).layers[0].bytes_per_token
    ids = inputs()[0]["input_ids"][:, :32]
    cache = packed_cache(narrow)
    with torch.no_grad():
        narrow(ids, past_key_values=cache)
    latents = cache.layers[0].unpacked()[1][0, 0, 1:]
    assert torch.linalg.matrix_rank(latents - latents.mean(0), rtol=1e-4) == 6


def test_bytes_are_as_predicted(measured):
    small = reduced(measured, 0.3)
    ids, cache = inputs()[0]["input_ids"], packed_cache(small)
    for tokens in (5, 32, 48):
        cache.reset()
        with torch.no_grad():
            small(ids[:, :tokens], past_key_values=cache)
        assert cache.nbytes == cost_of(hw.shape_of(small), tokens, len(ids), "fp32").kv_bytes
    bf16 = small.bfloat16()
    codes = codes_of(reduced(measured, 0.3))
    cache = PackedCache(bf16, codes)
    with torch.no_grad():
        bf16(ids, past_key_values=cache)
    assert cache.nbytes == cost_of(hw.shape_of(bf16), ids.shape[1], len(ids), "bf16").kv_bytes


def test_padding_in_front_changes_nothing(measured):
    small = reduced(measured, 0.3)
    ids = inputs()[0]["input_ids"]
    alone = decoded(small, ids, packed_cache(small))
    pad = 5
    padded = torch.nn.functional.pad(ids, (pad, 0), value=1)
    mask = (torch.arange(padded.shape[1]) >= pad).long().expand(len(ids), -1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    # Tokens are packed where the slot is a multiple of 16: those that wait are whole, so read what both have packed.
    given = {"attention_mask": mask, "position_ids": positions}
    for backend in ("sdpa", "eager"):
        small.set_attn_implementation(backend)
        cache = packed_cache(small)
        logits = decoded(small, padded, cache, first=20 + pad, **given)[:, pad:]
        torch.testing.assert_close(logits[:, :20], alone[:, :20], rtol=1e-4, atol=1e-4)
        assert cache.padding.tolist() == [pad] * len(ids)
    whole = reduced(measured, digit="g")
    own, other = decoded(whole, ids, packed_cache(whole)), packed_cache(whole)
    assert (decoded(whole, padded, other, first=20 + pad, **given)[:, pad:] - own).abs().max() < 2e-3


def test_it_generates_with_beams_and_padding(measured):
    whole = reduced(measured, digit="g")
    ids = inputs()[0]["input_ids"][:, :20]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}  # fmt: skip  # noqa: E501
    for beams in (1, 3):
        texts = [
            whole.generate(ids, num_beams=beams, past_key_values=cache, **options)
            for cache in (None, packed_cache(whole))
        ]
        assert torch.equal(*texts)


def test_cropped_tokens_are_forgotten(measured):
    small = reduced(measured, 0.3)
    ids = inputs()[0]["input_ids"]
    cache, straight = packed_cache(small), packed_cache(small)
    with torch.no_grad():
        small(ids[:, :40], past_key_values=cache)
        cache.crop(-8)
        again = small(ids[:, 32:40], past_key_values=cache).logits
        small(ids[:, :32], past_key_values=straight)
        torch.testing.assert_close(again, small(ids[:, 32:40], past_key_values=straight).logits)


@pytest.mark.usefixtures("reopened_here")
def test_saved_model_gives_its_cache_again(measured, tmp_path):
    small = reduced(measured, 0.4)
    report = hw.save(small, tmp_path / "out")
    assert report["class"] == type(small).__name__
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = inputs()[0]["input_ids"]
    own, others = packed_cache(small), packed_cache(stock)
    assert torch.equal(decoded(small, ids, own), decoded(stock, ids, others))
    others.save(tmp_path / "prefix.safetensors")
    loaded = PackedCache.load(tmp_path / "prefix.safetensors", stock, codes_of(stock))
    with torch.no_grad():
        following = [stock(ids[:, :1], past_key_values=cache).logits for cache in (others, loaded)]
    assert torch.equal(*following)


def test_other_caches_are_left_alone(measured):
    small = reduced(measured, 0.3)
    ids = inputs()[0]["input_ids"]
    packed_cache(small)
    packed_cache(small)
    assert len(small.model.layers[0].self_attn._forward_pre_hooks) == 1
    with torch.no_grad():
        expected = measured[0](ids).logits
    assert (decoded(small, ids, DynamicCache()) - expected).abs().max() < 1e-4
    assert (decoded(small, ids, DynamicCache(config=small.config)) - expected).abs().max() < 1e-4


def test_heads_and_widths_stay_and_the_plan_says_so(measured):
    _, profile = measured
    plan = plan_for(profile, Budget("keep_kv", 0.3, 4096), cache="latent")
    assert "heads and widths stay as they are" in plan.predicted["notes"][-1]
    assert {change.kind for changes in plan.layers for change in changes} == {"bits"}
    for budget, cache in ((Budget("keep_kv", 0.5), "none"), (Budget("keep_attention_params", 0.8), "mixed")):
        with pytest.raises(InputError, match="only the cache can be reduced"):
            plan_for(profile, budget, cache=cache)
    with pytest.raises(InputError, match="only the cache can be reduced"):
        Latent(("8" * 14,)).check(profile.shape.layers[0], "layer 0")
    with pytest.raises(InputError, match="keep their stock class"):
        build_reduced(measured[0], plan, tensors=profile.tensors, form="per-layer")
    with pytest.raises(InputError, match="keys must hold 1 rows of 4 digits"):
        Bits(("88",), ("8" * 10,)).check(profile.shape.layers[0], "layer 0")


def test_menus_offer_bits_alone(measured):
    _, profile = measured
    shape, budget = profile.shape, Budget("keep_kv", 1.0, 4096)
    request = MenuRequest(profile, [lambda layer: budget.cost(layer, shape)], cache="mixed")
    offered = [option for (number, _), option in options(request) if number == 0]
    losses = [option.loss for option in offered]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    digits = {digit for option in offered for change in option.changes() for digit in change.values[0]}
    assert {"0", "8"} <= digits


def text(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 40, (4, 32), generator=generator)} for _ in range(count)]


def test_what_reads_rounded_latents_learns():
    model = tiny("deepseek_v2", hidden_size=64, first_k_dense_replace=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.ndim > 1 else 1)
    profile = hw.inspect(model, inputs=text(1, 8), config=hw.InspectConfig(tokens=1024, maps=False), checks=False)
    small = reduced((model, profile), digit="1")
    quick = {"context": 32, "batch": 4, "accumulate": 4, "rate": 2e-3, "held_out": 96, "evaluations": 4}
    config = hw.HealConfig(tokens=12800, local_tokens=960, precision="fp32", **quick)
    for changes in ({"stage": "local"}, {"stage": "global"}, {"stage": "global", "train": "values"}):
        healed = hw.heal(small, teacher=model, inputs=text(50, 100), config=replace(config, **changes))
        facts = made_by_headwise(healed).facts["healed"]
        assert facts["after"] < 0.97 * facts["before"]
        before, after = codes_of(small), codes_of(healed)
        assert before.fingerprint != after.fingerprint
        assert torch.equal(before.layers[0].value_levels, after.layers[0].value_levels)
