"""Fewer MLP channels: the same as masking them, in every family; saved, planned together with attention, refitted."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise.checkpoints.profiled import Profile
from headwise.data.calibration import Batch
from headwise.families.mlp import mlp_of, read_mlp
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.files.errors import InputError
from headwise.planning.menus import ATTENTION
from headwise.records import Plan
from headwise.records import profile as records
from headwise.records.budget import Budget
from headwise.reduction.build import build_reduced
from headwise.reduction.mlp.change import Channels
from headwise.reduction.mlp.options import predicted_loss
from headwise.reduction.plans import menus_for, plan_for
from headwise.reduction.reduce import reduce_model
from headwise.reduction.removal.change import Removal
from headwise.reduction.widths.refit import refit_model
from headwise.runtime import modeling_headwise
from headwise.steps.compress import compress_model
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from headwise.training.trainable import make_trainable
from tests.calls import inspect
from tests.reduction.reopened import reopened_without_headwise
from tests.tiny import DECODERS, LATENT_MODELS, REDUCIBLE, tiny
from tests.tokens import save_tokenizer

NORMED = ("gemma2", "gemma3_text")  # a norm behind the MLP


def cut(shape, *counts):
    """A plan that leaves the MLPs so many channels, in turns."""
    layers = [() if layer.mlp is None else (Channels(counts[i % len(counts)]),) for i, layer in enumerate(shape.layers)]
    return Plan.make(shape, layers)


def orders(shape):
    """Tensors of a profile that put the last channels first."""
    counts = {f"{i}.mlp_order": layer.mlp.channels for i, layer in enumerate(shape.layers) if layer.mlp}
    return {name: torch.arange(count).flip(0).to(torch.int32) for name, count in counts.items()}


def mask(model, plan):
    """Silence by hand the first channels of each MLP, all but as many as ``plan`` keeps."""
    for site, changes in zip(sites_of(model), plan.layers, strict=True):
        for change in changes:
            mlp = mlp_of(site)
            weights = read_mlp(mlp)
            weights.w_down_MD[: mlp.channels - change.channels] = 0
            if not change.channels and weights.b_down_D is not None:
                weights.b_down_D.zero_()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    tiny("llama", attention_bias=False).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away from here " * 16)
    inspect(str(folder / "model"), folder / "run", texts=[str(folder / "text.txt")], tokens=192, lengths=(16, 32))
    return tiny("llama", attention_bias=False), Profile.load(folder / "run"), folder


@pytest.mark.parametrize("name", REDUCIBLE)
@torch.no_grad()
def test_cut_channels_are_masked_channels(name):
    model = tiny(name)
    shape, inputs = shape_of(model), example_inputs(model)
    dense = model(**inputs)[0]
    full = [() if layer.mlp is None else (Channels(layer.mlp.channels),) for layer in shape.layers]
    same = build_reduced(model, Plan.make(shape, full), form="per-layer")
    torch.testing.assert_close(same(**inputs)[0], dense, rtol=1e-5, atol=1e-5)
    for counts in ((20,), (20, 0, 31)):
        plan = cut(shape, *counts)
        reduced = build_reduced(model, plan, tensors=orders(shape))
        assert isinstance(reduced, modeling_headwise.ReducedModel) == (len(counts) > 1)
        assert shape_of(reduced) == shape.planned(plan)
        assert shape.planned(plan).total_parameters() == sum(p.numel() for p in reduced.parameters())
        masked = tiny(name)
        mask(masked, plan)
        torch.testing.assert_close(reduced(**inputs)[0], masked(**inputs)[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(reduced(**inputs)[0], dense, atol=1e-3)


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_mlps_that_cannot_be_cut_are_left_alone(name):
    shape = shape_of(tiny(name))
    assert all(layer.mlp is None for layer in shape.layers)
    with pytest.raises(InputError, match="Layer 0 of the plan: it has no MLP whose channels could be cut"):
        Plan.make(shape, [(Channels(8),)] * len(shape.layers))


@pytest.mark.parametrize("name", DECODERS)
def test_it_generates_and_comes_back_from_disk(name, tmp_path):
    model = tiny(name)
    reduced = build_reduced(model, cut(shape_of(model), 20, 0, 31))
    ids = example_inputs(model, tokens=8)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    tokens = reduced.generate(ids, **options)
    assert torch.equal(tokens, reduced.generate(ids, use_cache=False, **options))
    reduced.save_pretrained(tmp_path)
    again, info = type(reduced).from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation=reduced.config._attn_implementation
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert shape_of(again) == shape_of(reduced)
    assert torch.equal(tokens, again.generate(ids, **options))
    twice = build_reduced(again, Plan.full(shape_of(again)))
    assert torch.equal(tokens, twice.generate(ids, **options))


def test_all_layouts_open_without_headwise(tmp_path):
    expected = {}
    for name in ("gemma2", "phi3", "gpt2", "opt", "bert"):
        model = tiny(name)
        reduced, inputs = build_reduced(model, cut(shape_of(model), 20, 0, 31)), example_inputs(model)
        reduced.save_pretrained(tmp_path / name)
        save_file({field: value.contiguous() for field, value in inputs.items()}, tmp_path / f"{name}.in")
        with torch.no_grad():
            expected[name] = reduced(**inputs)[0]
    reopened_without_headwise(tmp_path, expected)
    for name, output in expected.items():
        assert torch.allclose(load_file(tmp_path / f"{name}.out")["output"], output, atol=1e-5), name


def test_channels_outside_the_model_are_refused():
    shape = shape_of(tiny("llama"))
    for count in (-1, 49):
        with pytest.raises(InputError, match=f"{count} MLP channels are asked for, the model has 0 to 48"):
            cut(shape, count)
    with pytest.raises(InputError, match="nothing is left for mlp"):
        Plan.make(shape, [(Removal("block"), Channels(8)), (), ()])


def test_a_plan_of_it_survives_its_file(tmp_path):
    shape = shape_of(tiny("llama"))
    plan = Plan.make(shape, [(Channels(8), Removal("attention")), (Channels(0),), ()])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.describe() == ("no attention; MLP 8 channels", "no MLP", "")
    after = shape.planned(plan).layers
    assert not after[0].heads and after[0].mlp.channels == 8 and after[1].mlp is None
    model = tiny("llama")
    reduced = build_reduced(model, plan)
    assert shape_of(reduced) == shape.planned(plan)


def test_importance_is_the_fisher_information_of_masks(measured):
    model, profile, _ = measured
    for number, (layer, measurement) in enumerate(zip(profile.shape.layers, profile.layers, strict=True)):
        curve = measurement.values["mlp_damage"]
        assert len(curve) == records.MLP_PARTS + 1 and curve[-1] == 0 and curve == sorted(curve, reverse=True)
        assert sorted(profile.tensors[f"{number}.mlp_order"].tolist()) == list(range(layer.mlp.channels))
        losses = [predicted_loss(layer, measurement.values, Channels(count)) for count in range(49)]
        assert losses == sorted(losses, reverse=True) and losses[-1] == 0
        assert losses[0] == pytest.approx(max(curve[0], measurement.values["left_out"][0]))
    held_out = profile.held_out()
    small = {
        which: measure_distance(model, build_reduced(model, plan, tensors=tensors), held_out).divergence
        for which, plan, tensors in (
            ("felt least", cut(profile.shape, 40), profile.tensors),
            ("felt most", cut(profile.shape, 40), _reversed(profile)),
        )
    }
    assert small["felt least"] < small["felt most"]


def _reversed(profile):
    return {name: value.flip(0) if name.endswith("mlp_order") else value for name, value in profile.tensors.items()}


def test_a_plan_for_parameters_takes_both_and_a_plan_for_the_cache_takes_none(measured):
    model, profile, _ = measured
    budget = Budget("keep_params", 0.6)
    plan = plan_for(profile, budget, multiple=4)
    assert {change.acts_on for changes in plan.layers for change in changes} == {"attention", "mlp"}
    reduced = build_reduced(model, plan, tensors=profile.tensors)
    outside = profile.shape.outside_parameters
    assert sum(p.numel() for p in reduced.parameters()) - outside == budget.measure(profile.shape.planned(plan))
    assert budget.measure(profile.shape.planned(plan)) <= budget.limit(profile.shape)
    for kind in ("keep_kv", "kv_bytes_per_token", "keep_attention_params"):
        menus = menus_for(profile, Budget(kind, 0.5 if kind.startswith("keep") else 100), multiple=4)
        assert {part for _, part in menus} == {ATTENTION}


def test_refitted_downs_bring_it_nearer_and_are_kept_only_then(measured):
    model, profile, _ = measured
    plan = cut(profile.shape, 24)
    plain, fitted = (
        reduce_model(tiny("llama", attention_bias=False), plan, profile.tensors, refit=pieces)
        for pieces in ((), ("downs",))
    )
    batches = profile.held_out()
    before, after = (measure_distance(model, each.model, batches).error for each in (plain, fitted))
    assert after <= before
    if fitted.refit:
        assert fitted.refitted < fitted.cut
    else:
        for mine, theirs in zip(plain.model.parameters(), fitted.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [name for name in REDUCIBLE if name not in NORMED])
@torch.no_grad()
def test_refitting_downs_helps_in_every_family(name):
    model = tiny(name)
    batches = [example_inputs(model, 16, seed) for seed in range(6)]
    plan = cut(shape_of(model), 28, 20)
    reduced = build_reduced(model, plan, share=True)
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def distance():
        return measure_distance(model, reduced, [Batch(batch, 0, ()) for batch in batches]).divergence

    before = distance()
    refit_model(model, reduced, plan, batches, ("downs",))
    assert distance() < before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_profile_that_knows_no_mlps_still_serves(measured):
    model, profile, _ = measured
    old = Profile(
        **{
            **{name: getattr(profile, name) for name in ("model", "text", "settings", "versions", "inputs_hash")},
            "shape": replace(profile.shape, layers=tuple(replace(layer, mlp=None) for layer in profile.shape.layers)),
            "layers": tuple(
                replace(layer, values={name: value for name, value in layer.values.items() if name != "mlp_damage"})
                for layer in profile.layers
            ),
            "tensors": {name: tensor for name, tensor in profile.tensors.items() if not name.endswith("mlp_order")},
        }
    )
    old.check("profile")
    plan = plan_for(old, Budget("keep_params", 0.8), multiple=4)
    assert {change.acts_on for changes in plan.layers for change in changes} == {"attention"}
    assert shape_of(compress_model(model, plan, old)) == profile.shape.planned(plan)


@pytest.mark.parametrize("train", ["attention", "values", "lora"])
def test_cut_mlps_learn_and_whole_ones_do_not(train):
    model = tiny("llama")
    plan = Plan.make(shape_of(model), [(Channels(20),), (), ()])
    reduced = build_reduced(model, plan)
    inputs = example_inputs(reduced)
    with torch.no_grad():
        before = reduced(**inputs)[0]
    settle = make_trainable(reduced, train, [], mlps=[0])
    learning = {name for name, parameter in reduced.named_parameters() if parameter.requires_grad}
    assert learning and all("layers.0.mlp" in name for name in learning)
    with torch.no_grad():
        torch.testing.assert_close(settle()(**inputs)[0], before)


@pytest.mark.parametrize("stage", ["local", "global"])
def test_healing_learns_what_was_cut_of_an_mlp_and_nothing_else(stage):
    pytest.importorskip("accelerate")
    from headwise.records.healing import HealConfig
    from headwise.steps.heal import heal_model

    model = tiny("llama")
    small = compress_model(model, Plan.make(shape_of(model), [(Channels(20),), (), ()]))
    batches = [example_inputs(model, 16, seed) for seed in range(20)]
    config = HealConfig(tokens=256, stage=stage, precision="fp32", batch=1, held_out=64)
    healed = heal_model(small, teacher=model, inputs=batches, config=config)
    changed = {
        name
        for (name, before), after in zip(small.named_parameters(), healed.parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert changed == {f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
