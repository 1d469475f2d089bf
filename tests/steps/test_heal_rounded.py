"""Healing through rounding: what learns reads what its packed cache gives back, and keeps that cache."""

from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise.checkpoints.origin import made_by_headwise
from headwise.checkpoints.packed import codes_of
from headwise.records.budget import Budget
from headwise.reduction.plans import plan_for
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding
from tests.tiny import tiny
from tests.tokens import save_tokenizer

pytestmark = pytest.mark.usefixtures("reopened_here")
QUICK = hw.HealConfig(
    tokens=12800,
    context=32,
    batch=4,
    accumulate=4,
    rate=2e-3,
    held_out=96,
    evaluations=4,
    local_tokens=480,
    precision="fp32",
)


def text_inputs(seed, count=6):
    return [{"input_ids": torch.randint(3, 40, (4, 32), generator=torch.Generator().manual_seed(seed + i))} for i in range(count)]  # fmt: skip  # noqa: E501


@pytest.fixture(scope="module")
def rounded():
    torch.manual_seed(0)
    model = tiny("llama", hidden_size=64, head_dim=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.ndim > 1 else 1)
    profile = hw.inspect(model, inputs=text_inputs(0), config=hw.InspectConfig(tokens=768, maps=False), checks=False)
    plan = plan_for(profile, Budget("keep_kv", 0.06, 65536), cache="mixed")
    small = hw.compress(model, plan, profile, hw.CompressConfig(refit="none"))
    return model, profile, small


@pytest.mark.parametrize("stage", ["local", "global"])
def test_what_reads_rounded_numbers_comes_nearer(rounded, stage):
    model, profile, small = rounded
    healed = hw.heal(small, teacher=model, inputs=text_inputs(50, 120), config=replace(QUICK, stage=stage))
    facts = made_by_headwise(healed).facts["healed"]
    with rounding(small, codes_of(small)):
        assert measure_distance(model, small, profile.held_out()).divergence > 1e-3  # what is healed is the rounding
    assert measure_distance(model, small, profile.held_out()).divergence < 1e-4
    assert facts["after"] < facts["before"]
    before, after = codes_of(small), codes_of(healed)
    assert before is not None and after is not None and before.fingerprint != after.fingerprint
    assert all(torch.equal(before.layers[i].key_levels, after.layers[i].key_levels) for i in before.layers)


def test_healing_leaves_the_scale_of_values_to_which_levels_were_fitted(rounded):
    model, _, small = rounded
    config = replace(QUICK, rate=1e-12, local_rate=1e-12, tokens=512)
    healed = hw.heal(small, teacher=model, inputs=text_inputs(50), config=config)
    for name, weight in small.state_dict().items():
        assert torch.allclose(weight, healed.state_dict()[name], atol=1e-6), name


def test_a_healed_model_keeps_its_cache_in_its_folder(rounded, tmp_path):
    model, _, small = rounded
    healed = hw.heal(small, teacher=model, inputs=text_inputs(50), config=QUICK)
    save_tokenizer(tmp_path)
    hw.save(healed, tmp_path / "healed")
    opened = hw.open(tmp_path / "healed", device="cpu")
    assert codes_of(opened) is not None
    levels = sum(layer.packed.level_bytes for layer in hw.shape_of(opened).layers if layer.packed)
    assert hw.cache(opened).nbytes == levels > 0
