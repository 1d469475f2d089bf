"""Saved students: stock where possible, per-layer otherwise, always openable, never half-written."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from headwise.checkpoints import verify
from headwise.checkpoints.card import card
from headwise.checkpoints.load import open_model
from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.records import InputError, LayerPlan, Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from tests.tiny import tiny
from tests.tokens import save_tokenizer


def uniform(shape, heads, kv_heads, qk_dim, v_dim, **kwargs):
    return Plan.make(shape, tuple(LayerPlan(heads, kv_heads, qk_dim, v_dim, **kwargs) for _ in shape.layers))


def uneven(shape):
    layers = [LayerPlan.full(layer) for layer in shape.layers]
    first = shape.layers[0]
    layers[0] = LayerPlan(first.heads, first.kv_heads, first.qk_dim - 2, 5)
    return Plan.make(shape, tuple(layers))


SHARED = {"rope_pairs": ((0, 2),) * 2}
STOCK = [
    ("llama", lambda shape: uniform(shape, 4, 2, 4, 4, **SHARED)),
    ("llama", lambda shape: uniform(shape, 2, 1, 8, 8)),
    ("qwen2", lambda shape: uniform(shape, 4, 1, 4, 4, rope_pairs=((1, 3),))),
    ("qwen3", lambda shape: uniform(shape, 4, 2, 4, 4, **SHARED)),
    ("mistral", lambda shape: uniform(shape, 4, 2, 6, 6, rope_pairs=((0, 1, 3),) * 2)),
    ("gemma2", lambda shape: uniform(shape, 2, 2, 4, 4, **SHARED)),
    ("vit", lambda shape: uniform(shape, 4, 4, 3, 3)),
    ("gpt2", lambda shape: dropped(shape, 1)),
    ("gemma3_text", lambda shape: dropped(shape, 0)),
    ("bert", lambda shape: dropped(shape, 0, 2)),
]


def dropped(shape, *gone):
    layers = tuple(
        LayerPlan(layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim, dropped=index in gone)
        for index, layer in enumerate(shape.layers)
    )
    return Plan.make(shape, layers)


@pytest.mark.parametrize(("name", "make"), STOCK, ids=[f"{name}-{i}" for i, (name, _) in enumerate(STOCK)])
def test_what_a_stock_class_can_say_is_saved_without_custom_code(name, make, tmp_path):
    model = tiny(name)
    plan = make(shape_of(model))
    stock, own = build_reduced(model, plan), build_reduced(model, plan, form="per-layer")
    assert type(stock) is type(model)
    inputs = example_inputs(model)
    with torch.no_grad():
        assert torch.allclose(stock(**inputs)[0], own(**inputs)[0], atol=1e-5)
    report = save_student(stock, tmp_path / "out", plan=plan, source="")
    assert report["class"] == type(model).__name__
    assert not list((tmp_path / "out").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_listed_frequencies_are_exact_to_the_last_bit():
    model = tiny("llama", head_dim=64, max_position_embeddings=8192)
    shape = shape_of(model)
    pairs = tuple(range(0, 32, 3))
    stock = build_reduced(model, uniform(shape, 4, 2, 22, 22, rope_pairs=(pairs,) * 2), form="stock")
    assert torch.equal(stock.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq[list(pairs)])


@pytest.mark.parametrize(("name", "possible"), [("llama", False), ("qwen2", True), ("gemma", True), ("mistral", True)])
def test_whether_heads_must_divide_the_width_is_for_the_family_to_say(name, possible, tmp_path):
    model = tiny(name, num_key_value_heads=1)
    layer = shape_of(model).layers[0]
    student = build_reduced(model, uniform(shape_of(model), 3, 1, layer.qk_dim, layer.v_dim))
    assert (type(student) is type(model)) == possible
    student.save_pretrained(tmp_path)
    assert shape_of(open_model(str(tmp_path))) == shape_of(student)


def test_stock_without_named_pairs_chooses_one_set_for_the_whole_model():
    model = tiny("llama")
    plan = uniform(shape_of(model), 4, 2, 4, 4)
    assert type(build_reduced(model, plan)) is not type(model)  # auto keeps each head's own best pairs
    assert type(build_reduced(model, plan, form="stock")) is type(model)


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("llama", uneven, "differ in shape"),
        ("llama", lambda shape: uniform(shape, 4, 2, 8, 4), "differ in width"),
        ("llama", lambda s: uniform(s, 4, 2, 4, 4, rope_pairs=((0, 1), (0, 2))), "different RoPE pairs"),
        ("gpt2", lambda shape: uniform(shape, 4, 4, 4, 4), "cannot state a head width"),
        ("vit", lambda shape: uniform(shape, 4, 2, 4, 4), "no grouped key/value heads"),
        ("gemma3_text", lambda shape: uniform(shape, 4, 2, 4, 4, **SHARED), "cannot list its frequencies"),
    ],
)
def test_what_a_stock_class_cannot_say_is_explained(name, make, reason):
    model = tiny(name)
    with pytest.raises(InputError, match=reason):
        build_reduced(model, make(shape_of(model)), form="stock")


@pytest.mark.usefixtures("fresh_check")
def test_saved_folder_is_complete(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    plan = uneven(shape_of(model))
    student = build_reduced(model, plan)
    options = {"plan": plan, "source": str(tmp_path / "dense"), "command": "headwise compress"}
    report = save_student(student, tmp_path / "out", shard="20KB", **options)
    assert report["missing"] == report["unexpected"] == []
    assert report["difference"] == 0.0
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    expected = {"config.json", "generation_config.json", "modeling_headwise.py", "plan.json", "README.md"}
    assert names >= expected | {"tokenizer.json", "model.safetensors.index.json"}
    assert Plan.load(out / "plan.json") == plan
    assert "headwise compress" in (out / "README.md").read_text()
    assert "trust_remote_code=True" in (out / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(out)("hello").input_ids

    # headwise is imported here, so its classes are known and no remote code is needed.
    again = AutoModelForCausalLM.from_pretrained(out)
    inputs = example_inputs(student)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], student(**inputs)[0])
        base = AutoModel.from_pretrained(out)
        assert torch.equal(base(**inputs)[0], student.model(**inputs)[0])
    again.save_pretrained(tmp_path / "twice")  # as Trainer does
    assert (tmp_path / "twice" / "modeling_headwise.py").is_file()
    state = load_file(tmp_path / "twice" / "model.safetensors")
    assert state.keys() == {key for key in student.state_dict() if key in state}
    assert shape_of(open_model(str(tmp_path / "twice"))) == shape_of(student)


@pytest.mark.parametrize(
    "order",
    [
        "import headwise, transformers",
        "import transformers, headwise",
        "from transformers import AutoConfig; import headwise",
    ],
)
def test_importing_headwise_is_enough_in_any_order(order, tmp_path):
    model = tiny("llama")
    build_reduced(model, uneven(shape_of(model))).save_pretrained(tmp_path)
    code = (
        f"{order}\nfrom transformers import AutoModelForCausalLM\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "headwise.runtime.modeling_headwise", process.stderr


def test_a_failed_check_leaves_nothing_behind(tmp_path, monkeypatch):
    model = tiny("llama")
    plan = uneven(shape_of(model))
    student = build_reduced(model, plan)
    monkeypatch.setattr(verify, "predicted_cache", lambda *args: -1)
    with pytest.raises(RuntimeError, match="the cache holds"):
        save_student(student, tmp_path / "out", plan=plan, source="")
    assert not list(tmp_path.iterdir())


def test_a_full_folder_is_never_overwritten(tmp_path):
    model = tiny("llama")
    plan = uneven(shape_of(model))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        save_student(build_reduced(model, plan), tmp_path / "out", plan=plan, source="")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


def test_half_precision_survives(tmp_path):
    model = tiny("llama").to(torch.bfloat16)
    plan = uneven(shape_of(model))
    found = save_student(build_reduced(model, plan), tmp_path / "out", plan=plan, source="")
    assert found["cache_bytes"] > 0
    assert open_model(str(tmp_path / "out")).dtype == torch.bfloat16


def test_the_card_says_what_was_done_to_each_layer():
    model = tiny("llama")
    shape = shape_of(model)
    plan = Plan.make(
        shape, (LayerPlan(4, 2, 6, 8), LayerPlan(4, 2, 8, 8, dropped=True), LayerPlan.full(shape.layers[2]))
    )
    reduced = build_reduced(model, plan)
    text = card(reduced, plan, "some/model", "", {"difference": 0.0})
    assert (
        "| layer | heads | key/value heads | query/key width | value width | change |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| 0 | 4 | 2 | 6 | 8 | qk dim 8 > 6 |\n"
        "| - | - | - | - | - | block dropped |\n"
        "| 1 | 4 | 2 | 8 | 8 | - |\n"
    ) in text
    with pytest.raises(InputError, match="The model has 2 layers, its plan leaves 3"):
        card(reduced, Plan.full(shape), "some/model", "", {"difference": 0.0})
