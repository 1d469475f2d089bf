"""Bits: planned by importance, folded into the weights without changing what they compute, read back from the cache."""

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
from headwise.reduction.bits.change import Bits
from headwise.reduction.bits.options import options, predicted_loss
from headwise.reduction.build import build_reduced
from headwise.reduction.plans import plan_for
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding
from tests.reduction.conftest import inputs
from tests.tiny import tiny

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "gpt2", "opt")
LAYER = LayerShape(4, 2, 4, 3, rotary=4)
BITS = Bits(("4321", "8765".replace("7", "6")), ("400", "123"))


@pytest.mark.parametrize("name", FAMILIES)
def test_bases_in_the_weights_change_nothing(name, profiles):
    model, profile = profiles(name)
    plan = plan_for(profile, Budget("keep_kv", 0.4, 4096), cache="mixed")
    assert any(isinstance(change, Bits) for changes in plan.layers for change in changes)
    reduced = build_reduced(model, plan, tensors=profile.tensors)
    assert type(reduced) is type(model)
    batch = inputs()[0]
    with torch.no_grad():
        difference = (model(**batch).logits - reduced(**batch).logits).abs().max()
    assert difference < 1e-4
    assert hw.shape_of(reduced) == hw.shape_of(model).planned(plan)


def test_windows_and_latents_keep_their_caches(profiles):
    for name in ("gemma3_text", "mistral"):
        _, profile = profiles(name)
        packed = [i for i, layer in enumerate(profile.layers) if "k_bit_damage" in layer.values]
        assert all(profile.shape.layers[i].window is None for i in packed)


def test_more_bits_are_nearer(profiles):
    model, profile = profiles("llama")
    held_out, distances = profile.held_out(), []
    for share in (0.5, 0.3, 0.2):
        plan = plan_for(profile, Budget("keep_kv", share, 4096), cache="mixed")
        reduced = hw.compress(model, plan, profile)
        with rounding(reduced, codes_of(reduced)):
            distances.append(measure_distance(model, reduced, held_out).divergence)
    assert distances == sorted(distances)
    assert 4 * distances[0] < distances[-1]


def test_first_token_is_read_whole(profiles):
    model, profile = profiles("llama")
    reduced = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.2, 4096), cache="mixed"), profile)
    ids = inputs()[0]["input_ids"]
    with torch.no_grad(), rounding(reduced, codes_of(reduced)):
        assert (reduced(ids).logits[:, 0] - model(ids).logits[:, 0]).abs().max() < 1e-4
        assert (reduced(ids).logits[:, 1] - model(ids).logits[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize(("cache", "allowed"), [("int8", "08"), ("int4", "04"), ("mixed", "01234568")])
def test_only_what_may_be_used_is_used(cache, allowed, profiles):
    _, profile = profiles("llama")
    plan = plan_for(profile, Budget("keep_kv", 0.6, 4096), cache=cache)
    digits = {digit for changes in plan.layers for change in changes for row in (*change.keys, *change.values) for digit in row}  # fmt: skip  # noqa: E501
    assert digits
    assert digits <= set(allowed)
    assert plan.predicted["kept"] <= 0.6
    assert plan.budget["cache"] == cache


def test_without_rounding_heads_become_narrower_or_are_merged(profiles):
    _, profile = profiles("llama")
    plan = plan_for(profile, Budget("keep_kv", 0.6, 4096), multiple=2)
    assert {change.kind for changes in plan.layers for change in changes} == {"widths"}


def test_options_fall_in_cost_as_they_rise_in_loss(profiles):
    _, profile = profiles("llama")
    shape, budget = profile.shape, Budget("keep_kv", 1.0, 4096)
    request = MenuRequest(profile, [lambda layer: budget.cost(layer, shape)], cache="mixed")
    offered = [option for (number, _), option in options(request) if number == 0]
    padding = 3 * 4096  # the last byte of each kind of field
    assert all(a.cost + padding >= b.cost for a, b in pairwise(offered))
    assert all(a.loss <= b.loss + 1e-15 for a, b in pairwise(offered))
    for option in offered[:: len(offered) // 4]:
        (change,) = option.changes()
        change.check(shape.layers[0], "here")
        assert predicted_loss(shape.layers[0], profile.layers[0].values, change) == pytest.approx(option.loss)
        assert request.option(change.shape(shape.layers[0]), 0.0).cost == option.cost


def test_bits_stand_in_plans(tmp_path):
    shape = hw.shape_of(tiny("llama"))
    digits = ("44332211", "88664400")
    plan = Plan.make(shape, [(Bits(digits, digits),), (), ()])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "keys 3.5, values 3.5 bits" in plan.describe()[0]
    after = shape.planned(plan)
    assert cost_of(after, 100).kv_bytes < cost_of(shape, 100).kv_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace(BITS, keys=("4321",)), "2 rows of 4 digits"),
        (replace(BITS, values=("40", "12")), "2 rows of 3 digits"),
        (replace(BITS, keys=("4321", "4327")), "digits out of"),
    ],
)
def test_wrong_bits_are_refused(change, words):
    BITS.check(LAYER, "layer 0")
    with pytest.raises(InputError, match=words):
        change.check(LAYER, "layer 0")


def test_layers_without_a_growing_cache_are_refused():
    for layer in (replace(LAYER, window=4), replace(LAYER, cache="none")):
        with pytest.raises(InputError, match="every token"):
            BITS.check(layer, "layer 0")


def test_saved_model_gives_its_cache_again(profiles, tmp_path):
    model, profile = profiles("llama")
    small = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.4, 4096), cache="mixed"), profile)
    report = hw.save(small, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert report["class"] == "LlamaForCausalLM"
    ids = inputs()[0]["input_ids"]
    generated = []
    for one in (small, stock):
        cache = packed_cache(one)
        mask = torch.ones_like(ids)
        generated.append(
            one.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, do_sample=False, eos_token_id=None
            )
        )
        assert cache.nbytes == cost_of(hw.shape_of(one), cache.get_seq_length(), len(ids), "fp32").kv_bytes
    assert torch.equal(*generated)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.1)
    with pytest.raises(InputError, match="another model"):
        packed_cache(stock)
    with pytest.raises(InputError, match=r"there is no cache\.safetensors"):
        packed_cache(tiny("llama"))


def test_values_that_say_nothing_need_no_map():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    profile = hw.inspect(model, inputs=inputs(), config=hw.InspectConfig(tokens=512, maps=False), checks=False)
    small = hw.compress(model, plan_for(profile, Budget("keep_kv", 0.4, 4096), cache="mixed"), profile)
    maps = {number: codes.value_map[0] for number, codes in codes_of(small).layers.items()}
    assert torch.equal(maps[1], torch.eye(len(maps[1])).half()) and not torch.equal(
        maps[0], torch.eye(len(maps[0])).half()
    )
