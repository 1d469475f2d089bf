"""Outputs fitted to what attention reads out of a rounded cache: nearer, nothing else touched, or left out."""

import pytest
import torch

import headwise as hw
from headwise.checkpoints.origin import made_by_headwise
from headwise.checkpoints.packed import codes_of
from headwise.records import Plan
from headwise.records.budget import Budget
from headwise.reduction import reduce
from headwise.reduction.bits.change import Bits
from headwise.reduction.build import build_reduced
from headwise.reduction.plans import plan_for
from headwise.reduction.widths.change import Widths
from headwise.tracing.fisher import measure_distance
from headwise.tracing.rounding import rounding
from tests.tiny import tiny

UNFITTED = hw.CompressConfig(refit="none")


@pytest.fixture(scope="module")
def measured():
    """A model whose attention says something, and enough text to fit outputs to."""
    torch.manual_seed(0)
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.ndim > 1 else 1)
    generator = torch.Generator().manual_seed(0)
    inputs = [{"input_ids": torch.randint(3, 40, (4, 32), generator=generator)} for _ in range(24)]
    return model, hw.inspect(model, inputs=inputs, config=hw.InspectConfig(tokens=3072, maps=False), checks=False)


def distance(model, small, batches):
    with rounding(small, codes_of(small)):
        return measure_distance(model, small, batches).divergence


@pytest.mark.parametrize("cache", ["mixed", "latent"])
def test_outputs_alone_change_and_bring_the_model_nearer(cache, measured):
    model, profile = measured
    plan = plan_for(profile, Budget("keep_kv", 0.1, 65536), cache=cache)
    plain, small, again = (hw.compress(model, plan, profile, config) for config in (UNFITTED, None, None))
    held_out, facts = profile.held_out(), made_by_headwise(small).facts
    assert type(small) is type(model) and facts["refit"] == ["outputs"]
    assert facts["cut"] == pytest.approx(distance(model, plain, held_out))
    assert facts["refitted"] == pytest.approx(distance(model, small, held_out))
    assert facts["refitted"] < facts["cut"]
    before, after = plain.state_dict(), small.state_dict()
    assert {key.split(".")[-2] for key in before if not torch.equal(before[key], after[key])} == {"o_proj"}
    assert all(torch.equal(after[key], value) for key, value in again.state_dict().items())
    levels = (codes_of(one).layers for one in (plain, small))
    assert all(torch.equal(a.levels, b.levels) for a, b in zip(*(own.values() for own in levels), strict=True))


def test_what_does_not_help_is_taken_back(measured, monkeypatch):
    model, profile = measured
    plan = plan_for(profile, Budget("keep_kv", 0.15, 65536), cache="latent")

    def spoil(model, reduced, *_):
        with torch.no_grad():
            weight = reduced.model.layers[1].self_attn.o_proj.weight
            weight.data = -weight

    monkeypatch.setattr(reduce, "refit_model", spoil)
    reduced = reduce.reduce_model(model, plan, profile.tensors)
    assert reduced.refit == () and reduced.refitted > reduced.cut
    expected = build_reduced(model, plan, tensors=profile.tensors).state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in reduced.model.state_dict().items())


def test_cuts_are_fitted_before_levels_and_outputs_behind_them_again(measured):
    model, profile = measured
    layer = profile.shape.layers[1]
    bits = Bits(("2" * layer.qk_dim,) * layer.kv_heads, ("2" * layer.value_group_width,) * layer.value_groups)
    narrow = Widths(layer.heads, layer.kv_heads, layer.qk_dim // 2, layer.v_dim // 2)
    plan = Plan.make(profile.shape, ((narrow,), (bits,), ()))
    small = hw.compress(model, plan, profile)
    facts, queries = (
        made_by_headwise(small).facts,
        hw.compress(model, plan, profile, hw.CompressConfig(refit="queries")),
    )
    assert facts["refit"] == ["queries", "outputs"]
    assert facts["refitted"] == pytest.approx(distance(model, small, profile.held_out()))
    assert facts["refitted"] < distance(model, queries, profile.held_out())
