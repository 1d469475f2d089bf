"""Caches of a few RoPE pairs and one latent: exact where nothing is left out, as large as said, used as any cache."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.checkpoints.save import keep_own_code
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.planning.menus import MenuRequest
from headwise.records import Plan, cost_of
from headwise.records.budget import Budget
from headwise.records.shape import LayerShape
from headwise.reduction.absorbed.change import Absorbed
from headwise.reduction.absorbed.options import options, predicted_loss
from headwise.reduction.bits.change import Bits
from headwise.reduction.build import build_reduced
from headwise.reduction.plans import plan_for
from headwise.runtime import reopen
from headwise.tracing import positions
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from tests.reduction.conftest import inputs
from tests.reduction.reopened import reopened_without_headwise
from tests.reduction.test_reduced import check_generates_alike
from tests.tiny import DECODERS, tiny

NORMED = ("qwen3", "gemma3_text")
ABSORBABLE = [name for name in DECODERS if name not in NORMED]
LAYER = LayerShape(8, 4, 8, 6, rotary=4)


def narrowed(shape, joined=2, share=0.6):
    """Every layer with blocks of ``joined`` heads: fast pairs kept once, of the others every second let go."""
    layers = []
    for layer in shape.layers:
        size, half = min(joined, layer.kv_heads), layer.rotary // 2
        kept, free = tuple(range(half // 2)), tuple(range(half // 2, half, 2))
        most = size * (2 * len(free) + layer.qk_dim - layer.rotary + layer.v_dim)
        pairs = tuple(sorted([*kept, *kept[:1]] if size > 1 else kept))
        layers.append(Absorbed(size, max(1, int(share * most)), (pairs,) * (layer.kv_heads // size), free))
    return Plan.make(shape, tuple(layers))


def whole(shape, joined):
    return Plan.make(shape, tuple(Absorbed.whole(layer, joined) for layer in shape.layers))


def stepwise(model, ids, **more):
    """Logits of ``ids`` given one by one."""
    cache, logits = None, []
    for place in range(ids.shape[1]):
        output = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True, **more)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("name", ABSORBABLE)
def test_everything_kept_is_the_identity(name):
    """For all tokens at once, which read keys and values, and for one by one, which read latents."""
    model = tiny(name)
    shape, inputs = shape_of(model), example_inputs(model)
    for joined in (size for size in (1, 2, 4) if not shape.layers[0].kv_heads % size):
        plan = whole(shape, joined)
        small = build_reduced(model, plan)
        assert shape_of(small) == shape.planned(plan)
        assert shape_of(small).total_parameters() == sum(p.numel() for p in small.parameters())
        with torch.no_grad():
            expected = model(**inputs)[0]
            assert torch.allclose(small(**inputs)[0], expected, atol=1e-5, rtol=0)
            assert torch.allclose(stepwise(small, inputs["input_ids"])[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_without_positions_no_more_is_cached_than_there_are_inputs(name):
    model = tiny(name)
    shape, inputs = shape_of(model), example_inputs(model)
    plan = Plan.make(shape, tuple(Absorbed(4, shape.width + 1, ((),)) for _ in shape.layers))
    assert shape.planned(plan).layers[0].cached_per_token == shape.width + 1 < shape.layers[0].cached_per_token
    with torch.no_grad():
        assert torch.allclose(build_reduced(model, plan)(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ABSORBABLE)
def test_narrowed_caches_save_reopen_and_generate(name, tmp_path):
    model = tiny(name)
    plan = narrowed(shape_of(model))
    small = build_reduced(model, plan)
    shape = shape_of(small)
    assert shape == shape_of(model).planned(plan)
    assert shape.total_parameters() == sum(p.numel() for p in small.parameters())
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path, attn_implementation=small.config._attn_implementation).eval()
    ids = example_inputs(model, tokens=8)["input_ids"]
    with torch.no_grad():
        output = small(ids, use_cache=True)
        assert torch.equal(again(ids).logits, output.logits)
        assert torch.allclose(stepwise(small, ids)[0], output.logits, atol=1e-5, rtol=0)
    assert reopen.cache_bytes(output.past_key_values) == cost_of(shape, 8, len(ids), "fp32").kv_bytes
    check_generates_alike(small, ids)


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_latents_are_cropped_read_by_several_tokens_and_by_every_backend(name):
    model = tiny(name)
    small = build_reduced(model, narrowed(shape_of(model)))
    ids = example_inputs(model, tokens=10)["input_ids"]
    with torch.no_grad():
        expected = small(ids).logits
        for backend in ("sdpa", "eager"):
            small.set_attn_implementation(backend)
            for few in (0, 1 << 40):  # rebuilt keys and values, and latents as they are
                for module in small.modules():
                    if hasattr(module, "few"):
                        module.few = few
                cache = small(ids, use_cache=True).past_key_values
                cache.crop(-4)
                step = small(ids[:, 6:], past_key_values=cache).logits
                assert torch.allclose(step, expected[:, 6:], atol=1e-5, rtol=0)


def test_what_a_config_says_of_the_cache_is_what_it_holds():
    model = tiny("llama")
    small = build_reduced(model, narrowed(shape_of(model)))
    cache = small(example_inputs(model)["input_ids"], use_cache=True).past_key_values
    for number, layer in enumerate(cache.layers):
        said = small.config.per_layer_config[number]
        assert layer.keys.shape[1] == said.num_key_value_heads
        assert (layer.keys.shape[-1], layer.values.shape[-1]) == (said.qk_head_dim, said.v_head_dim)


def test_copies_and_pickles_are_the_same_model():
    model = tiny("llama")
    small, ids = build_reduced(model, narrowed(shape_of(model))), example_inputs(model)
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(other(**ids).logits, small(**ids).logits)


def test_latents_open_without_headwise(tmp_path):
    names = ("llama", "gpt2", "gemma2")
    expected = {}
    for name in names:
        model = tiny(name)
        small, given = build_reduced(model, narrowed(shape_of(model))), example_inputs(model)
        small.save_pretrained(tmp_path / name)
        keep_own_code(small, tmp_path / name)
        save_file({key: tensor.contiguous() for key, tensor in given.items()}, tmp_path / f"{name}.in")
        with torch.no_grad():
            expected[name] = small(**given)[0]
    reopened_without_headwise(tmp_path, names)
    for name in names:
        assert torch.allclose(load_file(tmp_path / f"{name}.out")["output"], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Absorbed(3, 8, ((0,),)), "4 key/value heads make no blocks of 3"),
        (Absorbed(2, 8, ((0,),)), "must hold 2 lists of one length"),
        (Absorbed(2, 8, ((1, 0), (0, 1))), "ascending numbers from 0 and below 2, each at most 2 times"),
        (Absorbed(2, 8, ((0, 0, 0), (0, 1, 1))), "each at most 2 times"),
        (Absorbed(2, 8, ((0,), (0,)), (1, 1)), "free must be ascending"),
        (Absorbed(2, 8, ((0,), (1,)), (1,)), "pair 1 cannot both keep and lose its position"),
        (Absorbed(2, 25, ((0,), (0,)), (1,)), "rank is 25; the latent of such a block has from 1 to 24"),
    ],
)
def test_what_cannot_be_cached_so_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change.check(LAYER, "here")


def test_a_layer_without_anything_of_its_keys_is_refused():
    with pytest.raises(InputError, match="nothing of the keys is left"):
        Absorbed(1, 4, ((),)).check(LayerShape(2, 1, 4, 4, rotary=4), "here")


@pytest.mark.parametrize("name", [*NORMED, "bert", "deepseek_v3"])
def test_what_cannot_be_absorbed_says_why(name):
    shape = shape_of(tiny(name))
    reason = {"bert": "only decoders", "deepseek_v3": "latent attention"}.get(name, "behind a norm")
    with pytest.raises(InputError, match=reason):
        whole(shape, 1)


def test_latents_are_not_reduced_further():
    small = build_reduced(tiny("llama"), narrowed(shape_of(tiny("llama"))))
    shape = shape_of(small)
    rounded = Bits(("8" * 8,) * 2, ("8" * 16,))
    for change in (rounded, Absorbed(1, 4, ((0,), (0,)))):
        with pytest.raises(InputError, match="holds latents already"):
            Plan.make(shape, (change, (), ()))


def test_a_plan_of_latents_survives_its_file(tmp_path):
    plan = narrowed(shape_of(tiny("llama")))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.describe()[0] == "1 x 3 RoPE pairs, 1 without position, latent of 12 for 2 kv heads"


@pytest.fixture(scope="module")
def measured():
    """Models and profiles that know what positions are worth."""
    known = {}

    def profile(name):
        if name not in known:
            model = tiny(name)
            config = hw.InspectConfig(tokens=512, maps=False, positions=True)
            known[name] = model, hw.inspect(model, inputs=inputs(), config=config, checks=False)
        return known[name]

    return profile


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_menus_hold_what_is_predicted_and_costs_what_it_says(name, measured):
    _, profile = measured(name)
    budget = Budget("keep_kv", 0.5)
    request = MenuRequest(profile, [lambda layer: budget.cost(layer, profile.shape)], multiple=2, absorb=True)
    offered = list(options(request))
    assert offered and not list(options(replace(request, absorb=False)))
    for (number, _), option in offered:
        layer = profile.shape.layers[number]
        (change,) = option.changes()
        change.check(layer, "here")
        assert predicted_loss(layer, profile.layers[number].values, change) == pytest.approx(option.loss, abs=1e-9)
        assert budget.cost(change.shape(layer), profile.shape) == option.cost


def test_positions_cost_what_the_model_without_them_measures(measured, monkeypatch):
    """All pairs of one layer kept in full or let go: the same as in a model that was built so."""
    monkeypatch.setattr(positions, "TURNS", (10.0, 1e9))
    model, profile = measured("llama")
    layer = profile.shape.layers[1]
    batches = [{"input_ids": batch["input_ids"]} for batch in inputs()]
    lost = positions.positions_lost(model, batches, [1])[1]
    assert [*lost] == [0, 3, 4] and not lost[0]
    for count, nats in lost.items():
        if count:
            free = tuple(range(4 - count, 4))
            pairs = tuple(pair for pair in range(4 - count) for _ in range(2))
            change = Absorbed(2, 2 * (2 * count + layer.v_dim), (pairs,), free)
            small = build_reduced(model, Plan.make(profile.shape, ((), change, ())))
            with torch.no_grad():
                logs = [each(**batch).logits.log_softmax(-1) for batch in batches for each in (model, small)]
            kl = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(logs[::2], logs[1::2], strict=True)]
            assert nats == pytest.approx(torch.stack(kl).mean().item(), rel=1e-2, abs=1e-7)


def test_latents_are_planned_refitted_and_healed(measured):
    model, profile = measured("llama")
    plan = plan_for(profile, Budget("keep_kv", 0.4), multiple=2, absorb=True)
    assert any(isinstance(change, Absorbed) for changes in plan.layers for change in changes)
    assert plan.budget["absorb"] == {"context": 48}
    assert (
        plan.predicted["loss_increase"]
        < plan_for(profile, Budget("keep_kv", 0.4), multiple=2).predicted["loss_increase"]
    )
    held_out = profile.held_out()
    cut = build_reduced(model, plan, tensors=profile.tensors)
    small = hw.compress(model, plan, profile)
    far, near = (measure_distance(model, each, held_out).divergence for each in (cut, small))
    assert near < far
    text = torch.cat([batch["input_ids"].flatten() for batch in inputs()])
    config = hw.HealConfig(tokens=512, context=32)
    healed = hw.heal(small, teacher=model, text=[{"input_ids": text.view(-1, 32)}], config=config)
    assert shape_of(healed) == shape_of(small)
    assert measure_distance(model, healed, held_out).divergence < far
    number = next(i for i, layer in enumerate(shape_of(small).layers) if layer.absorbed)
    module, before = (each.base_model.layers[number].self_attn for each in (healed, small))
    for name in ("factors", "key_maps", "value_maps", "value_shift"):
        new, old = getattr(module, name), getattr(before, name)
        assert not new.numel() or not torch.equal(new, old)


def test_latents_are_not_planned_from_profiles_that_do_not_know_positions(profiles):
    model, profile = profiles("llama")
    with pytest.raises(InputError, match="does not say what positions are worth"):
        plan_for(profile, Budget("keep_kv", 0.5), absorb=True)
    with pytest.raises(InputError, match="inspect the model with `positions`"):
        build_reduced(model, whole(profile.shape, 2), tensors=profile.tensors)
