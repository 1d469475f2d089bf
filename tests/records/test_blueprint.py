"""Plans of models that do not exist yet. That the arithmetic is right, tests/families/test_fresh.py shows on models."""

import json
from dataclasses import replace

import pytest

from headwise.records import InputError, LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Images, Text

TEXT = Blueprint(72, Text(97, 48, tied=False))
IMAGES = Blueprint(72, Images(12, 4, 3, 5))
DIMS = ((8, 8, 4, 4), (4, 2, 8, 6), (0, 0, 0, 0))


def plan_of(family="llama", blueprint=TEXT, dims=DIMS):
    shape = blueprint.shape(family, 32, dims)
    return Plan.make(shape, tuple(LayerPlan(*layer) for layer in dims), blueprint=blueprint)


@pytest.mark.parametrize(("family", "blueprint"), [("llama", TEXT), ("gpt2", TEXT), ("vit", IMAGES)])
def test_it_survives_its_file_and_says_each_layer_once(family, blueprint, tmp_path):
    plan = plan_of(family, blueprint)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").shape_to_build() == blueprint.shape(family, 32, DIMS)
    assert "before" not in json.loads((tmp_path / "plan.json").read_text())


def test_it_is_the_plan_that_changes_nothing_in_its_model():
    plan = plan_of()
    shape = plan.shape_to_build()
    assert shape.planned(plan) == shape
    with pytest.raises(InputError, match="made for another model"):
        plan.check(TEXT.shape("llama", 32, DIMS[:2]))


def test_plans_of_the_first_version_are_still_read(tmp_path):
    shape = TEXT.shape("llama", 32, DIMS)
    body = {
        "headwise": "plan",
        "version": 1,
        "family": "llama",
        "width": 32,
        "before": [list(layer) for layer in DIMS],
        "layers": [dict(zip(("heads", "kv_heads", "qk_dim", "v_dim"), layer)) for layer in DIMS],
        "budget": {},
        "predicted": {},
        "profile": "",
    }
    (tmp_path / "plan.json").write_text(json.dumps(body))
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == Plan.full(shape)
    with pytest.raises(InputError, match="does not say how to build one"):
        plan.shape_to_build()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda plan: plan["blueprint"].pop("mlp"), "blueprint: the field 'mlp' is missing"),
        (lambda plan: plan["blueprint"].pop("text"), "blueprint: the field 'images' is missing"),
        (lambda plan: plan["blueprint"].update(depth=3), "blueprint: unknown field 'depth'"),
        (lambda plan: plan["blueprint"]["text"].update(vocab="all"), "text, vocab: expected a whole number"),
        (lambda plan: plan["blueprint"]["text"].update(context=0), "cannot be built with context 0"),
        (lambda plan: plan["blueprint"].update(mlp=-8), "cannot be built with mlp -8"),
        (lambda plan: plan.update(width=0), "cannot be built with width 0"),
        (lambda plan: plan.update(layers=[]), "cannot be built with layers 0"),
        (lambda plan: plan.update(family="opt"), "Models of opt cannot be built from scratch; llama, gpt2, vit can"),
        (lambda plan: plan.update(family="vit"), "A vit model reads images, not text"),
        (lambda plan: plan["layers"][0].update(qk_dim=5), "an odd rotary width cuts a pair in half"),
        (lambda plan: plan["layers"][0].update(kv_heads=3), "8 query heads cannot share 3 key/value heads"),
        (lambda plan: plan["layers"][0].update(heads=-8), "heads is -8"),
        (lambda plan: plan["layers"][0].update(dropped=True), "no heads, RoPE pairs or blocks to keep or drop"),
        (lambda plan: plan.update(layers=plan["layers"][2:]), "no self-attention at all"),
    ],
)
def test_what_cannot_be_built_says_why(damage, sentence, tmp_path):
    content = json.loads(plan_of().text())
    damage(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        Plan.load(path).shape_to_build()
    assert sentence in str(error.value)


def test_a_hand_edited_layer_needs_one_change_only(tmp_path):
    content = json.loads(plan_of().text())
    content["layers"][0].update(heads=16, kv_heads=16)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    edited = Plan.load(tmp_path / "plan.json")
    assert edited.shape_to_build().layers[0] == replace(plan_of().shape_to_build().layers[0], heads=16, kv_heads=16)


@pytest.mark.parametrize(("size", "patch"), [(12, 5), (4, 8)])
def test_patches_must_fill_an_image(size, patch):
    with pytest.raises(InputError, match="cannot be cut into patches"):
        Images(size, patch, 3, 5)
