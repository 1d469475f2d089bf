"""Blocks side by side: one block computes what several would beside each other, in every family that can say it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from headwise.data.calibration import Batch
from headwise.families.mlp import mlp_of
from headwise.families.shapes import shape_of
from headwise.families.sites import matrix, sites_of
from headwise.files.errors import InputError
from headwise.records import Plan, cost_of
from headwise.records.settings import CostConfig
from headwise.reduction.absorbed.change import Absorbed
from headwise.reduction.build import build_reduced
from headwise.reduction.flatten.change import Flatten
from headwise.reduction.mlp.change import Channels
from headwise.reduction.removal.change import Removal
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.refit import refit_model
from headwise.runtime import reopen
from headwise.runtime.modeling_headwise import ReducedModel
from headwise.steps.cost import report_cost
from headwise.tracing.example import example_inputs
from headwise.tracing.fisher import measure_distance
from headwise.tracing.forward import forward
from headwise.tracing.side_by_side import side_by_side
from tests.reduction.reopened import reopened_without_headwise
from tests.reduction.test_reduced import greedy
from tests.tiny import DECODERS, tiny

NORMED = ("gemma2", "gemma3_text")  # norms behind attention and MLP
DECODING = tuple(name for name in DECODERS if name not in NORMED)
FLAT = (*DECODING, "vit", "deit")
PAIR, ALL = Flatten(1), Flatten(2)


def lively(name, **options):
    """A tiny model whose norms and biases are not all ones and zeros."""
    model = tiny(name, **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def halves(layer, *, width):
    """Changes of two neighbours that leave heads of one width, by other RoPE pairs, and MLPs of two."""
    H, G, K, V = layer.dims
    lists = [None, None]
    if width < K:
        lists = [((0, 1),) * G, ((3, 1),) * G]
    mlp = layer.mlp.channels
    return [(Widths(H, G, width, V // 2, pairs), Channels(mlp - 8 * (n + 1))) for n, pairs in enumerate(lists)]


def plans_for(shape):
    """Changes of the blocks apart, and those that join them."""
    layer = shape.layers[0]
    whole = layer.norm == "none" and layer.rotary == layer.qk_dim
    first, second = halves(layer, width=4 if whole else layer.qk_dim)
    H, G, K, V = layer.dims
    one_head = Widths(H // G, 1, K, V, None, tuple(range(H // G)))
    return [
        ([(), (), ()], [(PAIR,), (), ()]),
        ([(), (), ()], [(), (PAIR,), ()]),
        ([(), (), ()], [(ALL,), (), ()]),
        ([first, second, ()], [(*first, PAIR), second, ()]),
        ([(one_head,), (), ()], [(one_head, PAIR), (), ()]),
    ]


def beside_each_other(model, plan, inputs):
    """The output of ``model`` with the runs of blocks that ``plan`` joins side by side, by hand."""
    sites = sites_of(model)
    for run in plan.made_of():
        members = [sites[number] for number in run]
        if len(members) > 1:
            _put_beside(members)
    with torch.no_grad():
        return forward(model, inputs)[0]


def _put_beside(members):
    def pass_on(hidden_states, *args, **kwargs):
        return hidden_states

    def beside(hidden_states, *args, **kwargs):
        for site in members:
            del site.block.forward
        output = side_by_side(members, hidden_states, args, kwargs)
        _put_beside(members)
        return output

    members[0].block.forward = beside
    for site in members[1:]:
        site.block.forward = pass_on


@pytest.mark.parametrize("name", FLAT)
def test_one_block_is_several_side_by_side(name):
    model = lively(name)
    shape, inputs = shape_of(model), example_inputs(model)
    for apart, together in plans_for(shape):
        plan = Plan.make(shape, together)
        joined = build_reduced(model, plan)
        planned = shape.planned(plan)
        assert shape_of(joined) == planned
        assert planned.total_parameters() == sum(p.numel() for p in joined.parameters())
        split = build_reduced(model, Plan.make(shape, apart), form="per-layer")
        expected = beside_each_other(split, plan, inputs)
        torch.testing.assert_close(joined(**inputs)[0], expected, rtol=1e-5, atol=1e-5)
        one_after_the_other = build_reduced(model, Plan.make(shape, apart))(**inputs)[0]
        assert not torch.allclose(expected, one_after_the_other, atol=1e-3)


@pytest.mark.parametrize("name", FLAT)
def test_halves_may_have_lost_their_attention_or_their_mlp(name):
    model = lively(name)
    shape, inputs = shape_of(model), example_inputs(model)
    gone = Removal("attention")
    for layers in (
        [(gone, PAIR), (), ()],
        [(PAIR,), (gone, Channels(24)), ()],
        [(Channels(0), PAIR), (), ()],
        [(gone, Channels(0), PAIR), (Channels(0),), ()],
    ):
        plan = Plan.make(shape, layers)
        joined = build_reduced(model, plan)
        assert shape_of(joined) == shape.planned(plan)
        kept = [[change for change in own if isinstance(change, Channels) and change.channels] for own in layers]
        silenced = build_reduced(model, Plan.make(shape, kept))
        for site, own in zip(sites_of(silenced), layers, strict=True):
            for projection in [site.out] * (gone in own) + [mlp_of(site).down] * (Channels(0) in own):
                matrix(projection).data.zero_()
                if projection.bias is not None:
                    projection.bias.data.zero_()
        expected = beside_each_other(silenced, plan, inputs)
        torch.testing.assert_close(joined(**inputs)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECODING)
def test_joined_blocks_generate_with_every_cache_and_come_back_from_disk(name, tmp_path):
    model = lively(name)
    shape = shape_of(model)
    ids = example_inputs(model, tokens=8)["input_ids"]
    for _, together in plans_for(shape)[2:4]:
        joined = build_reduced(model, Plan.make(shape, together), form="per-layer")
        tokens = greedy(joined, ids)
        assert torch.equal(tokens, greedy(joined, ids, use_cache=False))
        assert torch.equal(tokens, greedy(joined, ids, cache_implementation="static"))
        cache = DynamicCache(config=joined.config)
        with torch.no_grad():
            joined(ids, past_key_values=cache, use_cache=True)
        planned = shape.planned(Plan.make(shape, together))
        assert reopen.cache_bytes(cache) == cost_of(planned, ids.shape[1], batch=2, dtype="fp32").kv_bytes
        joined.save_pretrained(tmp_path)
        again = type(joined).from_pretrained(tmp_path)
        assert torch.equal(tokens, greedy(again, ids))


def test_joined_blocks_open_without_headwise(tmp_path):
    expected = {}
    for name in FLAT:
        model = lively(name)
        shape, inputs = shape_of(model), example_inputs(model)
        joined = build_reduced(model, Plan.make(shape, plans_for(shape)[3][1]), form="per-layer")
        joined.save_pretrained(tmp_path / name)
        save_file({field: value.contiguous() for field, value in inputs.items()}, tmp_path / f"{name}.in")
        with torch.no_grad():
            expected[name] = joined(**inputs)[0]
    process = reopened_without_headwise(tmp_path, expected)
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    for (name, output), report in zip(expected.items(), reports, strict=True):
        assert report["missing"] == report["unexpected"] == []
        assert torch.allclose(load_file(tmp_path / f"{name}.out")["output"], output, atol=1e-5), name


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma"])
def test_all_pairs_joined_are_a_stock_model_of_half_the_depth(name):
    model = lively(name, num_hidden_layers=4, attention_bias=False)
    shape, inputs = shape_of(model), example_inputs(model)
    plan = Plan.make(shape, [(PAIR,), ()] * 2)
    joined = build_reduced(model, plan)
    assert not isinstance(joined, ReducedModel)
    config, before = joined.config, model.config
    assert (config.num_hidden_layers, config.head_dim) == (2, before.head_dim)
    assert config.num_attention_heads == 2 * before.num_attention_heads
    assert config.intermediate_size == 2 * before.intermediate_size
    torch.testing.assert_close(joined(**inputs)[0], beside_each_other(model, plan, inputs), rtol=1e-5, atol=1e-5)


def test_layers_of_other_scales_keep_them():
    model = lively("gpt2", scale_attn_by_inverse_layer_idx=True)
    shape, inputs = shape_of(model), example_inputs(model)
    plan = Plan.make(shape, [(), (PAIR,), ()])
    joined = build_reduced(model, plan)(**inputs)[0]
    torch.testing.assert_close(joined, beside_each_other(model, plan, inputs), rtol=1e-5, atol=1e-5)


def test_a_joined_model_can_be_reduced_again():
    model = lively("llama")
    shape, inputs = shape_of(model), example_inputs(model)
    joined = build_reduced(model, Plan.make(shape, [(PAIR,), (), ()]), form="per-layer")
    two = shape_of(joined)
    again = build_reduced(joined, Plan.make(two, [(Widths(4, 2, 8, 8, None, (0, 1, 6, 7)), Channels(60), PAIR), ()]))
    assert shape_of(again).layers[0].dims == (8, 4, 8, 8)
    same = build_reduced(joined, Plan.make(two, [(PAIR,), ()]))
    at_once = build_reduced(model, Plan.make(shape, [(ALL,), (), ()]))
    assert shape_of(same) == shape_of(at_once)
    with torch.no_grad():
        apart, both = (sites_of(each)[0] for each in (joined, same))
        torch.testing.assert_close(both.out.weight[:, :64], apart.out.weight)
        assert torch.isfinite(again(**inputs)[0]).all()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "has norms behind its attention or MLP"),
        ("gemma2", {}, "must have the same window, found 6, None"),
        ("bert", {}, "has norms behind its attention or MLP"),
        ("opt", {"do_layer_norm_before": False}, "has norms behind its attention or MLP"),
        ("opt", {"enable_bias": False}, "none that could take them up"),
        ("whisper", {}, "from an encoder-decoder"),
        ("deepseek_v2", {}, "latent attention"),
    ],
)
def test_blocks_that_cannot_be_joined_say_why(name, options, sentence):
    model = lively(name, **options)
    shape = shape_of(model)
    with pytest.raises(InputError, match=sentence):
        build_reduced(model, Plan.make(shape, [(PAIR,), *[()] * (len(shape.layers) - 1)]))


def test_plans_that_join_wrongly_say_what_is_wrong():
    shape = shape_of(tiny("llama"))
    wrong = {
        "there are fewer": [(), (), (PAIR,)],
        "layer 1 is joined to it and cannot": [(PAIR,), (PAIR,), ()],
        "a block that is dropped cannot be joined": [(PAIR,), (Removal("block"),), ()],
        "at least one block must be joined": [(Flatten(0),), (), ()],
        "nothing is left for flatten": [(Removal("block"), PAIR), (), ()],
        "must have heads of one width": [(Widths(4, 2, 8, 4), PAIR), (), ()],
        "its cache holds latents already": [(Absorbed.whole(shape.layers[0], 2), PAIR), (), ()],
        "as many query heads for each key/value head": [(Widths(2, 2, 8, 8), PAIR), (), ()],
    }
    for sentence, layers in wrong.items():
        with pytest.raises(InputError, match=sentence):
            Plan.make(shape, layers)


def test_a_plan_says_what_became_of_each_block(tmp_path):
    plan = Plan.make(shape_of(tiny("llama")), [(), (PAIR,), (Channels(40),)])
    assert plan.describe() == ("", "joined by the next block", "MLP 40 channels; joined to 1")
    assert plan.made_of() == ((0,), (1, 2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").layers == plan.layers
    tiny("llama").save_pretrained(tmp_path / "model")
    report = report_cost(str(tmp_path / "model"), tmp_path / "plan.json", CostConfig())
    assert report.kept == (0, 1, None)
    shown = str(report)
    assert "4 > 8" in shown and "2 joined to 1" in shown


def test_a_fit_brings_joined_blocks_nearer():
    model = lively("llama")
    shape, batches = shape_of(model), [example_inputs(model, 32, seed) for seed in range(8)]
    plan = Plan.make(shape, [(), (PAIR,), ()])
    joined = build_reduced(model, plan)
    inputs = [Batch(batch, 0, ()) for batch in batches]
    before = measure_distance(model, joined, inputs).divergence
    refit_model(model, joined, plan, batches, ("outputs", "downs"))
    assert measure_distance(model, joined, inputs).divergence < 0.5 * before
