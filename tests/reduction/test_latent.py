"""Joint latents: planned where they may be, near the model at full rank, saved, opened elsewhere and read back."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise as hw
from headwise.checkpoints.packed import cache as packed_cache
from headwise.checkpoints.packed import codes_of
from headwise.files.errors import InputError
from headwise.planning.menus import MenuRequest
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.records.shape import LayerShape
from headwise.reduction.latent.change import Latent
from headwise.reduction.latent.options import options, predicted_loss
from headwise.reduction.mlp.change import Channels
from headwise.reduction.plans import plan_for
from headwise.runtime.cache import read_spec, write_spec
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding
from tests.reduction.conftest import inputs
from tests.tiny import tiny

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "gpt2", "opt")
LAYER = LayerShape(4, 2, 4, 3, rotary=4)
LATENT = Latent(("43210000000000",))
UNFITTED = hw.CompressConfig(refit="none")


def latents(profile, digit):
    """A latent with as many bits for each coordinate of every layer."""
    rows = ((digit * layer.joint_group_width,) * layer.value_groups for layer in profile.shape.layers)
    return Plan.make(profile.shape, [Latent(digits) for digits in rows])


@pytest.mark.parametrize("name", FAMILIES)
def test_all_coordinates_with_all_bits_are_nearly_the_model(name, profiles):
    model, profile = profiles(name)
    small = hw.compress(model, latents(profile, "8"), profile, UNFITTED)
    assert type(small) is type(model)
    ids = inputs()[0]["input_ids"]
    with torch.no_grad():
        dense = model(ids).logits
        assert (small(ids).logits - dense).abs().max() < 1e-4
        with rounding(small, codes_of(small)):
            assert (small(ids).logits - dense).norm() < 0.02 * dense.norm()
        cache = packed_cache(small)
        steps = [small(part, past_key_values=cache).logits for part in ids.split((40, 1, 7), dim=1)]
        assert (torch.cat(steps, dim=1) - dense).norm() < 0.02 * dense.norm()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_whole_coordinates_are_the_model(name, profiles, tmp_path):
    model, profile = profiles(name)
    small = hw.compress(model, latents(profile, "g"), profile, UNFITTED)
    ids = inputs()[0]["input_ids"]
    with torch.no_grad():
        dense = model(ids).logits
        cache = packed_cache(small)
        steps = [small(part, past_key_values=cache).logits for part in ids.split((40, 1, 7), dim=1)]
        assert (torch.cat(steps, dim=1) - dense).norm() < 1e-3 * dense.norm()
    write_spec(tmp_path / "codes", codes_of(small))
    assert read_spec(tmp_path / "codes").digest == codes_of(small).digest
    assert cost_of(hw.shape_of(small), 48).kv_bytes == cost_of(hw.shape_of(small), 32).kv_bytes + sum(
        16 * (2 * layer.value_groups * layer.joint_group_width + 1) for layer in profile.shape.layers
    )


def test_whole_latents_of_a_multi_head_model_are_exact_at_half_the_bytes(profiles):
    model, profile = profiles("gpt2")
    plan = plan_for(profile, Budget("keep_kv", 0.56, 65536), cache="whole")
    assert {digit for changes in plan.layers for change in changes for digit in "".join(change.coordinates)} == {*"0g"}
    small = hw.compress(model, plan, profile)
    with rounding(small, codes_of(small)):
        assert measure_distance(model, small, profile.held_out()).divergence < 1e-6


def test_latents_are_taken_only_where_they_may_be(profiles):
    _, profile = profiles("llama")
    budget = Budget("keep_kv", 0.2, 4096)
    kinds = {
        cache: {change.kind for changes in plan_for(profile, budget, cache=cache).layers for change in changes}
        for cache in ("mixed", "latent")
    }
    assert "latent" not in kinds["mixed"]
    assert "latent" in kinds["latent"]


def test_more_bits_are_nearer(profiles):
    model, profile = profiles("llama")
    held_out, distances = profile.held_out(), []
    for share in (0.3, 0.2, 0.12):
        plan = plan_for(profile, Budget("keep_kv", share, 4096), cache="latent")
        small = hw.compress(model, plan, profile)
        with rounding(small, codes_of(small)):
            distances.append(measure_distance(model, small, held_out).divergence)
    assert distances == sorted(distances)


def test_options_fall_in_cost_as_they_rise_in_loss(profiles):
    _, profile = profiles("llama")
    shape, budget = profile.shape, Budget("keep_kv", 1.0, 4096)
    request = MenuRequest(profile, [lambda layer: budget.cost(layer, shape)], cache="latent")
    offered = [option for (number, _), option in options(request) if number == 0]
    assert all(a.cost + 3 * 4096 >= b.cost and a.loss <= b.loss + 1e-15 for a, b in pairwise(offered))
    for option in offered[:: len(offered) // 4]:
        (change,) = option.changes()
        change.check(shape.layers[0], "here")
        assert predicted_loss(shape.layers[0], profile.layers[0].values, change) == pytest.approx(option.loss)
    assert not list(options(replace(request, cache="mixed")))


def test_latents_stand_in_plans(tmp_path):
    shape = hw.shape_of(tiny("llama"))
    plan = Plan.make(shape, [(Latent(("4" * 8 + "0" * 24,)),), (), ()])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "latent of 8, 4.0 bits" in plan.describe()[0]
    packed = shape.planned(plan).layers[0].packed
    assert (packed.live, packed.rebuilding) == (8, 8 * 2 * 8)
    assert cost_of(shape.planned(plan), 100).kv_bytes < cost_of(shape, 100).kv_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Latent(("4321",)), "must hold 14 digits"),
        (Latent(("4" * 7,) * 3), "3 rows of coordinates do not fit 2"),
        (Latent(("7" * 14,)), "digits out of"),
    ],
)
def test_wrong_latents_are_refused(change, words):
    LATENT.check(LAYER, "layer 0")
    with pytest.raises(InputError, match=words):
        change.check(LAYER, "layer 0")


def test_saved_model_gives_its_latents_again(profiles, tmp_path):
    model, profile = profiles("llama")
    small = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.25, 4096), cache="latent"), profile)
    hw.save(small, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids, texts = inputs()[0]["input_ids"], []
    for one in (small, stock):
        cache = packed_cache(one)
        settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
        texts.append(one.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings))
        assert cache.nbytes == cost_of(hw.shape_of(one), cache.get_seq_length(), len(ids), "fp32").kv_bytes
    assert torch.equal(*texts)


def test_healing_keeps_latents(profiles):
    model, profile = profiles("llama")
    small = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.15, 4096), cache="latent"), profile)
    config = hw.HealConfig(
        tokens=1536, context=48, batch=2, held_out=96, evaluations=2, precision="fp32", stage="global"
    )
    healed = hw.heal(small, teacher=model, inputs=inputs() * 3, config=config)
    before, after = codes_of(small), codes_of(healed)
    assert all(codes.joint == after.layers[number].joint for number, codes in before.layers.items())
    assert hw.plan_of(healed).layers == hw.plan_of(small).layers


def test_a_packed_cache_is_not_lost_by_the_way(profiles, tmp_path):
    model, profile = profiles("llama")
    small = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.25, 4096), cache="latent"), profile)
    channels = hw.Plan.make(hw.shape_of(small), [(Channels(8),), (), ()])
    with pytest.raises(InputError, match=r"has a packed cache, which .* does not say how to pack in layer 0"):
        hw.compress(small, channels)
