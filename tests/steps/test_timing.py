"""Decode time: rates fitted to timed layers, kept for the next time, and plans within them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.files.errors import BudgetError, InputError
from headwise.records.budget import Budget
from headwise.records.packing import packed_of
from headwise.records.shape import Latent, LayerShape, MlpShape, ModelShape
from headwise.records.timing import Timing, decode_work
from headwise.reduction.plans import plan_for
from headwise.steps import timing
from headwise.steps.timing import nonnegative, time_layers
from tests.tiny import tiny

LAYER = LayerShape(4, 2, 8, 8, rotary=8, rest_matmul=1000)
SHAPE = ModelShape("llama", 32, (LAYER, LAYER), 100, 50, max_tokens=64)


@pytest.fixture(scope="module")
def measured():
    model = tiny("llama", head_dim=16)
    ids = torch.randint(3, 97, (8, 64), generator=torch.Generator().manual_seed(0))
    return model, hw.inspect(model, inputs=[{"input_ids": ids}], config=hw.InspectConfig(tokens=256, context=64))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headwise" / "timings"


def test_work_of_every_sort_of_layer():
    weights = LAYER.matmul_weights(32)
    assert decode_work(LAYER, SHAPE, 10) == {
        "block": 1,
        "weights": weights,
        "dense": 1,
        "dense numbers": 10 * 32,
        "dense scores": 40,
    }
    packed = LayerShape(4, 2, 8, 8, rotary=8, packed=packed_of([4, 4, 0, 1] * 8))
    assert decode_work(packed, SHAPE, 10)["packed coordinates"] == 10 * 24
    assert decode_work(LayerShape(0, 0, 0, 0, rest_matmul=7), SHAPE, 10) == {"block": 1, "weights": 0}


def test_rates_are_found_again_and_never_below_zero():
    chance = np.random.default_rng(0)
    amounts = chance.uniform(0, 1e6, (40, 5))
    rates = np.array([3.0, 0.0, 1e-3, 20.0, 7.0])
    assert np.allclose(nonnegative(amounts / (amounts @ rates)[:, None]), rates, atol=1e-9)
    assert (nonnegative(chance.normal(size=(30, 6))) >= 0).all()


def test_a_plan_within_decode_time_and_bytes(measured, own_cache, monkeypatch):
    model, profile = measured
    config = hw.PlanConfig(multiple_of=4)
    plan = hw.plan(profile, keep_kv=0.6, keep_decode_time=5.0, model=model, config=config)
    assert plan.predicted["kept"] <= 0.6
    assert plan.predicted["also"]["keep_decode_time"] <= 5.0
    assert "% of the KV cache and " in str(plan)
    plan.save(own_cache.parent / "plan.json")
    assert hw.Plan.load(own_cache.parent / "plan.json").predicted == plan.predicted
    assert plan.budget["keep_decode_time"] == 5.0
    assert plan.budget["device"] == "cpu"
    (kept,) = own_cache.iterdir()
    known = Timing.load(kept)
    assert known.context == profile.shape.max_tokens - timing.WARM - timing.COUNTED
    monkeypatch.setattr(timing, "time_layers", None)  # whatever is asked again is known
    assert hw.plan(profile, keep_kv=0.6, keep_decode_time=5.0, model=model, config=config).layers == plan.layers


def test_every_layer_is_timed(measured):
    model, profile = measured
    budget = Budget("keep_kv", 0.5, 32)
    plan = plan_for(profile, budget, cache="mixed")
    timed = time_layers(model, plan, 32)
    assert len(timed.blocks) == len(profile.shape.layers)
    assert min(timed.blocks) > 0


def test_decode_time_is_allocated_exactly():
    rates = {"block": 100.0, "dense": 50.0, "dense numbers": 2.0}
    known = Timing("cpu", "float32", 10, 1000.0, rates)
    budget = Budget("keep_kv", 0.5, 10, also=(Budget("keep_decode_time", 0.9, 10),)).with_timing(known)
    _, time = budget.each()
    assert time.measure(SHAPE) == 1000 + 2 * (150 + 2 * 320)
    assert time.cost(None, SHAPE) == 0
    assert time.limit(SHAPE) == int(0.9 * time.measure(SHAPE))


def test_attention_and_mlp_are_planned_apart():
    """Rounding included: what both save by themselves is what they save together."""
    known = Timing("cpu", "float32", 10, 0.4, {"block": 1.3, "weights": 0.37, "dense numbers": 0.71}, {"other": 3.0})
    layer = replace(LAYER, rest_parameters=1000, mlp=MlpShape(33, 17, 17))
    narrow, thin = (replace(layer, v_dim=3), layer.with_channels(5))
    both = narrow.with_channels(5)
    whole, alone, other, together = (known.of_layer(each, SHAPE) for each in (layer, narrow, thin, both))
    assert together - whole == (alone - whole) + (other - whole)


@pytest.mark.parametrize("name", ["gpt2", "phi", "gemma3_text"])
def test_time_is_planned_for_every_sort_of_decoder(name, own_cache):
    model = tiny(name)
    ids = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(0))
    profile = hw.inspect(
        model, inputs=[{"input_ids": ids}], config=hw.InspectConfig(tokens=256, maps=False), checks=False
    )
    assert hw.plan(profile, keep_decode_time=1.5, model=model).predicted["kept"] <= 1.5


def test_what_cannot_be_is_said(measured, own_cache):
    model, profile = measured
    with pytest.raises(InputError, match="give the `model`"):
        hw.plan(profile, keep_decode_time=0.5)
    with pytest.raises(BudgetError, match="of the decode time is not possible"):
        hw.plan(profile, keep_decode_time=0.001, model=model)
    for layer, words in (
        (LayerShape(4, 4, 8, 8, cache="none"), "for decoders alone"),
        (replace(LAYER, latent=Latent(8, 4)), "latent attention"),
        (replace(LAYER, packed=packed_of([4] * 32)), "packed already"),
    ):
        with pytest.raises(InputError, match=words):
            Budget("keep_decode_time", 0.5).check(ModelShape("llama", 32, (layer,), 1, 1))
    for share, context in ((0.0, None), (float("inf"), None), (0.5, 0)):
        with pytest.raises(InputError, match="ecode time is"):
            Budget("keep_decode_time", share, context)


def test_layers_are_whole_numbers(measured):
    _, profile = measured
    with pytest.raises(InputError, match="at least one layer"):
        Budget("layers", 2.5)
    assert len(hw.plan(profile, layers=2).made_of()) == 2
