"""Merged key/value heads: exact at full width, free where heads repeat one another, saved and run like the rest."""

from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.planning.menus import MenuRequest
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.records.shape import LayerShape
from headwise.reduction.bits.change import Bits
from headwise.reduction.build import build_reduced
from headwise.reduction.plans import plan_for
from headwise.reduction.sharing.change import Sharing
from headwise.reduction.sharing.options import options, predicted_loss
from headwise.reduction.widths.change import Widths
from headwise.runtime import reopen
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from tests.reduction.conftest import inputs
from tests.reduction.test_cut import edit
from tests.reduction.test_reduced import check_generates_alike
from tests.tiny import DECODERS, REDUCIBLE, tiny

NORMED = ("qwen3", "gemma3_text")
ONE_HEAD = ("qwen2",)
MERGEABLE = [name for name in REDUCIBLE if name not in NORMED + ONE_HEAD]
LAYER = LayerShape(8, 4, 8, 6, rotary=4)


def merged(shape, joined, share=1.0):
    """Every layer's heads merged, ``share`` of their widths kept; of RoPE pairs those of the lowest frequencies."""
    layers = []
    for layer in shape.layers:
        pairs, rotary = None, 0
        if layer.rotary:
            every = [pair for pair in range(layer.rotary // 2) for _ in range(joined)]
            pairs = (tuple(every[-max(1, int(share * len(every))) :]),) * (layer.kv_heads // joined)
            rotary = 2 * len(pairs[0])
        free = int(share * joined * (layer.qk_dim - layer.rotary))
        layers.append(Sharing(joined, rotary + free, max(1, int(share * joined * layer.v_dim)), pairs))
    return Plan.make(shape, tuple(layers))


@pytest.mark.parametrize("form", ["auto", "per-layer"])
@pytest.mark.parametrize("name", MERGEABLE)
def test_merged_at_full_width_is_the_identity(name, form):
    model = tiny(name)
    shape, inputs = shape_of(model), example_inputs(model)
    for joined in (size for size in (2, 4) if not shape.layers[0].kv_heads % size):
        plan = Plan.make(shape, tuple(Sharing(joined, joined * x.qk_dim, joined * x.v_dim) for x in shape.layers))
        small = build_reduced(model, plan, form=form)
        assert shape_of(small) == shape.planned(plan)
        with torch.no_grad():
            assert torch.allclose(small(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MERGEABLE)
def test_heads_that_repeat_one_another_are_merged_for_free(name):
    """Keys turned by another angle in each frequency, or mixed at will without RoPE, and values mixed at will."""
    model = tiny(name)

    def repeat(weights, layer):
        P = layer.rotary // 2
        generator = torch.Generator().manual_seed(5)
        angle = 6 * torch.rand(len(weights.w_k_GKD), P, generator=generator)
        turn = torch.eye(layer.qk_dim).repeat(len(angle), 1, 1)
        first, second = torch.arange(P), torch.arange(P) + P
        turn[:, first, first] = turn[:, second, second] = angle.cos()
        turn[:, first, second], turn[:, second, first] = -angle.sin(), angle.sin()
        free = layer.qk_dim - layer.rotary
        turn[:, layer.rotary :, layer.rotary :] = torch.randn(len(angle), free, free, generator=generator)
        mix = torch.randn(len(angle), layer.v_dim, layer.v_dim, generator=generator)
        new = {"w_k_GKD": turn @ weights.w_k_GKD[:1], "w_v_GVD": mix @ weights.w_v_GVD[:1]}
        if weights.b_k_GK is not None:
            new["b_k_GK"] = (turn @ weights.b_k_GK[:1, :, None])[..., 0]
        if weights.b_v_GV is not None:
            new["b_v_GV"] = (mix @ weights.b_v_GV[:1, :, None])[..., 0]
        return replace(weights, **new)

    shape, inputs = edit(model, repeat), example_inputs(model)
    plan = Plan.make(shape, tuple(Sharing(layer.kv_heads, layer.qk_dim, layer.v_dim) for layer in shape.layers))
    with torch.no_grad():
        assert torch.allclose(build_reduced(model, plan)(**inputs)[0], model(**inputs)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in DECODERS if name in MERGEABLE])
def test_merged_models_save_reopen_and_generate(name, tmp_path):
    model = tiny(name)
    small = build_reduced(model, merged(shape_of(model), 2, 0.6))
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path, attn_implementation=small.config._attn_implementation).eval()
    ids = example_inputs(model, tokens=8)["input_ids"]
    with torch.no_grad():
        output = small(ids, use_cache=True)
        assert torch.equal(again(ids).logits, output.logits)
    assert reopen.cache_bytes(output.past_key_values) == cost_of(shape_of(small), 8, len(ids), "fp32").kv_bytes
    check_generates_alike(small, ids)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_a_cache_of_merged_heads_can_be_cropped(name):
    model = tiny(name)
    small = build_reduced(model, merged(shape_of(model), 2, 0.6), form="per-layer")
    ids = example_inputs(model, tokens=10)["input_ids"]
    with torch.no_grad():
        cache = small(ids, use_cache=True).past_key_values
        cache.crop(-4)
        step = small(ids[:, 6:], past_key_values=cache).logits
        assert torch.allclose(step, small(ids).logits[:, 6:], atol=1e-5, rtol=0)


def test_one_set_of_frequencies_for_all_is_a_stock_model(tmp_path):
    """Each frequency once is the family's own RoPE; some of them, or some twice, are listed in its config."""
    model = tiny("llama")
    shape, inputs = shape_of(model), example_inputs(model)
    for qk_dim, pairs in ((8, None), (4, (1, 3)), (8, (0, 2, 2, 3)), (12, (0, 0, 1, 2, 3, 3))):
        change = Sharing(2, qk_dim, qk_dim, None if pairs is None else (pairs,))
        plan = Plan.make(shape, (change,) * len(shape.layers))
        stock, own = build_reduced(model, plan), build_reduced(model, plan, form="per-layer")
        assert type(stock) is type(model) and stock.config.num_key_value_heads == 1
        stock.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        with torch.no_grad():
            assert torch.allclose(again(**inputs).logits, own(**inputs).logits, atol=1e-5, rtol=0)
    mixed = (Sharing(2, 4, 4, ((1, 3),)), Sharing(2, 4, 4, ((1, 2),)), Sharing(2, 4, 4, ((1, 3),)))
    with pytest.raises(InputError, match="its heads keep different RoPE pairs"):
        build_reduced(model, Plan.make(shape, mixed), form="stock")


def test_widths_may_follow():
    model = tiny("llama")
    shape = shape_of(model)
    both = (Sharing(2, 12, 10, ((0, 0, 1, 2, 3, 3),)), Widths(4, 1, 6, 5, rope_pairs=((0, 2, 5),)))
    small = build_reduced(model, Plan.make(shape, (both, (), ())))
    assert shape_of(small).layers[0].dims == (4, 1, 6, 5)
    assert small.base_model.layers[0].self_attn.rope_pairs.tolist() == [[0, 1, 3]]
    assert small(**example_inputs(model)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Sharing(3, 8, 6), "4 key/value heads cannot be merged 3 at a time"),
        (Sharing(2, 18, 6), "qk_dim is 18; 2 merged heads have from 1 to 16"),
        (Sharing(2, 8, 13), "v_dim is 13"),
        (Sharing(2, 12, 6), "rope_pairs must be named where qk_dim is no multiple of 8"),
        (Sharing(2, 8, 6, ((0, 1),)), "must hold 2 lists of one length"),
        (Sharing(2, 8, 6, ((1, 0), (0, 1))), "ascending numbers between 0 and 1, each at most 2 times"),
        (Sharing(2, 8, 6, ((0, 0, 0), (0, 1, 1))), "each at most 2 times"),
        (Sharing(2, 11, 6, ((0,), (1,))), "does not fit 1 RoPE pairs"),
    ],
)
def test_what_cannot_be_merged_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change.check(LAYER, "here")


@pytest.mark.parametrize("name", NORMED)
def test_norms_on_queries_and_keys_are_refused(name):
    shape = shape_of(tiny(name))
    with pytest.raises(InputError, match="Layer 0 of the plan: key/value heads behind norms"):
        merged(shape, 2)


def test_a_plan_of_merged_heads_survives_its_file(tmp_path):
    shape = shape_of(tiny("llama"))
    plan = merged(shape, 2, 0.6)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.describe()[0] == "kv heads 2 merged to 1, qk dim 2 x 8 > 8, v dim 2 x 8 > 9"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "phi", "gpt2", "opt"])
def test_measured_bases_at_full_width_are_the_identity(name, profiles):
    model, profile = profiles(name)
    whole = [Sharing(2, 2 * layer.qk_dim, 2 * layer.v_dim) for layer in profile.shape.layers]
    small = build_reduced(model, Plan.make(profile.shape, tuple(whole)), tensors=profile.tensors)
    with torch.no_grad():
        assert torch.allclose(small(**inputs()[0]).logits, model(**inputs()[0]).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_menus_hold_what_is_predicted_and_costs_what_it_says(name, profiles):
    _, profile = profiles(name)
    budget = Budget("keep_kv", 0.5)
    request = MenuRequest(profile, [lambda layer: budget.cost(layer, profile.shape)], multiple=2, merge=True)
    offered = list(options(request))
    assert offered
    for (number, _), option in offered:
        layer = profile.shape.layers[number]
        (change,) = option.changes()
        change.check(layer, "here")
        assert predicted_loss(layer, profile.layers[number].values, change) == pytest.approx(option.loss, abs=1e-9)
        assert budget.cost(change.shape(layer), profile.shape) == option.cost


def test_the_better_of_merged_and_narrower_heads_is_planned(profiles):
    """Heads that repeat one another are merged; the model stays nearer, and a refit brings it nearer still."""
    model, profile = profiles("llama")
    plan = plan_for(profile, Budget("keep_kv", 0.5), multiple=2, merge=True)
    assert any(isinstance(change, Sharing) for changes in plan.layers for change in changes)
    narrow = Plan.make(profile.shape, (Widths(4, 2, 4, 4, rope_pairs=((0, 1), (0, 1))),) * 3)
    held_out = profile.held_out()
    far, near = (
        measure_distance(model, build_reduced(model, each, tensors=profile.tensors), held_out).divergence
        for each in (narrow, plan)
    )
    assert near < far
    refitted = hw.compress(model, plan, profile)
    assert measure_distance(model, refitted, held_out).divergence < near


def test_uniform_merges_are_stock_models(profiles):
    model, profile = profiles("llama")
    plan = plan_for(profile, Budget("keep_kv", 0.6), multiple=2, uniform=True, merge=True)
    small = build_reduced(model, plan, tensors=profile.tensors)
    assert type(small) is type(model)
    assert all(isinstance(change, Sharing) for changes in plan.layers for change in changes)
    assert (
        plan.predicted["loss_increase"]
        >= plan_for(profile, Budget("keep_kv", 0.6), merge=True).predicted["loss_increase"]
    )


def test_what_was_not_measured_is_not_merged_along_a_profile(profiles):
    model, profile = profiles("gpt_neox")
    plan = Plan.make(profile.shape, (Sharing(2, 12, 8, ((0, 0, 1, 1),) * 2),) * 3)
    tensors = {name: tensor for name, tensor in profile.tensors.items() if "shared" not in name}
    with pytest.raises(InputError, match="does not know what merging 2 key/value heads of layer 0"):
        build_reduced(model, plan, tensors=tensors)
    assert build_reduced(model, plan, tensors=tensors, method="svd")


def test_bits_may_follow_and_the_cache_reads_them(profiles):
    model, profile = profiles("llama")
    layers = []
    for layer, (change,) in zip(profile.shape.layers, merged(profile.shape, 2, 0.6).layers, strict=True):
        after = change.shape(layer)
        keys, values = ("8" * after.qk_dim,) * after.kv_heads, ("8" * after.value_group_width,) * after.value_groups
        layers.append((change, Bits(keys, values)))
    plan = Plan.make(profile.shape, tuple(layers))
    small = hw.compress(model, plan, profile)
    assert shape_of(small) == profile.shape.planned(plan)
    ids = inputs()[0]["input_ids"][:, :24]
    with torch.no_grad():
        cache = hw.cache(small)
        small(ids[:, :20], past_key_values=cache, use_cache=True)
        step = small(ids[:, 20:], past_key_values=cache, use_cache=True).logits
    assert torch.allclose(step, small(ids).logits[:, 20:], atol=2e-2, rtol=0)


def test_merged_heads_are_healed(profiles):
    model, profile = profiles("llama")
    small = hw.compress(model, merged(profile.shape, 2, 0.6), profile)
    text = torch.cat([batch["input_ids"].flatten() for batch in inputs()])
    config = hw.HealConfig(tokens=512, context=32)
    healed = hw.heal(small, teacher=model, text=[{"input_ids": text.view(-1, 32)}], config=config)
    assert shape_of(healed) == shape_of(small)
    held_out = profile.held_out()
    assert measure_distance(model, healed, held_out).divergence <= measure_distance(model, small, held_out).divergence
