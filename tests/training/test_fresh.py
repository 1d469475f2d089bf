"""Models built from a plan alone are just as large as the plan says, start as transformers starts, and can be saved."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import headwise as hw
from headwise.checkpoints.load import open_shape
from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.records.blueprint import Blueprint, Images, Text
from headwise.records.cost import cost_of
from headwise.records.design import Request
from headwise.steps.design import propose
from headwise.tracing.example import example_inputs
from headwise.training.fresh import fresh_model

TEXT = Blueprint(72, Text(97, 48, tied=True))
UNTIED = Blueprint(72, Text(97, 48, tied=False))
IMAGES = Blueprint(72, Images(12, 4, 3, 5))
ALIKE = ((4, 4, 8, 8),) * 3
MIXED = ((8, 8, 4, 4), (4, 2, 8, 6), (3, 3, 12, 12))
GAP = ((4, 4, 8, 8), (0, 0, 0, 0), (2, 1, 16, 8))
# name: (family, blueprint, layers, class)
PLANS = {
    "llama": ("llama", TEXT, ALIKE, "LlamaForCausalLM"),
    "llama grouped, untied": ("llama", UNTIED, ((4, 2, 12, 12),) * 2, "LlamaForCausalLM"),
    "llama by layer": ("llama", TEXT, MIXED, "HeadwiseLlamaForCausalLM"),
    "llama with a gap": ("llama", UNTIED, GAP, "HeadwiseLlamaForCausalLM"),
    "llama, heads that do not divide": ("llama", TEXT, ((3, 3, 10, 10),) * 2, "HeadwiseLlamaForCausalLM"),
    "gpt2": ("gpt2", TEXT, ALIKE, "GPT2LMHeadModel"),
    "gpt2 by layer": ("gpt2", TEXT, MIXED, "HeadwiseGPT2LMHeadModel"),
    "gpt2, wider attention": ("gpt2", UNTIED, ((8, 8, 8, 8),) * 3, "HeadwiseGPT2LMHeadModel"),
    "vit": ("vit", IMAGES, ALIKE, "ViTForImageClassification"),
    "vit, wider attention": ("vit", IMAGES, ((8, 8, 8, 8),) * 3, "ViTForImageClassification"),
    "vit by layer": ("vit", IMAGES, MIXED, "HeadwiseViTForImageClassification"),
}


REQUESTS = [
    Request("llama", 60_000, Text(128, 64, tied=True), intrinsic_dim=5),
    Request("llama", 60_000, Text(128, 64, tied=True), kv_bytes_per_token=300),
    Request("gpt2", 90_000, Text(128, 64, tied=True), lags=(1.0,)),
    Request("vit", 200_000, Images(8, 2, 1, 10)),
]


def plan_of(name):
    family, blueprint, dims, _ = PLANS[name]
    shape = blueprint.shape(family, 32, dims)
    return hw.Plan.make(shape, tuple(hw.LayerPlan(*layer) for layer in dims), blueprint=blueprint)


@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_just_what_the_plan_says(name):
    plan = plan_of(name)
    model = fresh_model(plan)
    promised = plan.shape_to_build()
    assert type(model).__name__ == PLANS[name][3]
    assert shape_of(model) == promised
    assert sum(parameter.numel() for parameter in model.parameters()) == promised.total_parameters()
    inputs = example_inputs(model)
    with torch.no_grad():
        out = model(**inputs)
    assert torch.isfinite(out.logits).all()
    if "input_ids" in inputs:
        rows, tokens = inputs["input_ids"].shape
        held = sum(
            layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers if layer.is_initialized
        )
        assert held == cost_of(promised, tokens, rows, "fp32").kv_bytes


@pytest.mark.parametrize("request_", REQUESTS, ids=["llama", "llama with little cache", "gpt2", "vit"])
def test_every_candidate_of_a_design_is_just_what_it_says(request_):
    for candidate in propose(request_).candidates:
        model = fresh_model(candidate.plan)
        assert shape_of(model) == candidate.shape, candidate.name
        promised = candidate.plan.predicted
        assert sum(parameter.numel() for parameter in model.parameters()) == promised["parameters"]
        assert cost_of(shape_of(model), 1).kv_bytes_per_token == promised["kv_bytes_per_token"]


@pytest.mark.parametrize("name", ["llama by layer", "gpt2", "gpt2 by layer", "vit by layer"])
def test_weights_start_as_in_transformers(name):
    model, layers = fresh_model(plan_of(name)), len(PLANS[name][2])
    small = 0.02 / (2 * layers) ** 0.5 if name.startswith("gpt2") else 0.02
    for key, weight in model.named_parameters():
        if weight.ndim >= 2:
            spread = small if key.endswith("c_proj.weight") else 0.02
            assert weight.std().item() == pytest.approx(spread, rel=0.25), key
        elif key.endswith("bias"):
            assert not weight.any(), key


def test_the_seed_decides_and_the_callers_randomness_stays():
    plan = plan_of("llama by layer")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again, other = fresh_model(plan, seed=1), fresh_model(plan, seed=1), fresh_model(plan, seed=2)
    assert torch.equal(torch.rand(2), expected)
    key = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])


def test_a_narrow_head_turns_and_scales_as_a_stock_head_of_its_width():
    dims = ((8, 8, 4, 4), (4, 4, 8, 8))
    shape = TEXT.shape("llama", 32, dims)
    mixed = fresh_model(hw.Plan.make(shape, tuple(hw.LayerPlan(*layer) for layer in dims), blueprint=TEXT)).eval()
    for index, layer in enumerate(dims):
        alone = TEXT.shape("llama", 32, (layer,))
        stock = fresh_model(hw.Plan.make(alone, (hw.LayerPlan(*layer),), blueprint=TEXT)).eval()
        assert type(stock) is LlamaForCausalLM
        stock.model.layers[0].load_state_dict(
            {key: value for key, value in mixed.model.layers[index].state_dict().items() if "rope_pairs" not in key}
        )
        hidden, positions = torch.randn(2, 9, 32), torch.arange(9)[None]
        with torch.no_grad():
            expected = stock.model.layers[0](hidden, position_embeddings=stock.model.rotary_emb(hidden, positions))
            got = mixed.model.layers[index](hidden, position_embeddings=mixed.model.rotary_emb(hidden, positions))
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama by layer", "gpt2 by layer", "vit by layer"])
def test_it_saves_and_comes_back(name, tmp_path):
    plan = plan_of(name)
    model = fresh_model(plan)
    report = save_student(model, tmp_path / "model", plan=plan, source="")
    assert report["missing"] == []
    assert hw.Plan.load(tmp_path / "model" / "plan.json") == plan
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "reduced by headwise" not in card and "built from scratch" in card
    assert open_shape(str(tmp_path / "model")) == plan.shape_to_build()


def test_generation_works_in_a_model_by_layer(tmp_path):
    fresh_model(plan_of("llama with a gap")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_a_plan_that_reduces_cannot_be_built():
    plan = hw.Plan.full(TEXT.shape("llama", 32, ALIKE))
    with pytest.raises(hw.InputError, match="does not say how to build one"):
        fresh_model(plan)
