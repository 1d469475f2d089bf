import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.files.reading import Reader
from headwise.records import InputError, Latent, LayerPlan, LayerShape, ModelShape, Plan
from headwise.records.blueprint import Blueprint, Text
from headwise.records.change import read_change
from headwise.reduction.removal.change import Removal
from headwise.reduction.widths.change import Widths
from tests.plans import layer_plans, plans

SAMPLES = Path(__file__).parent / "samples"

ROTARY = LayerShape(8, 4, 16, 16, rotary=16)
PARTIAL = LayerShape(8, 4, 16, 16, rotary=8)
PLAIN = LayerShape(8, 8, 16, 16)
MLA = LayerShape(8, 8, 12, 8, rotary=4, latent=Latent(16, 4))


def model(*layers, family="llama"):
    return ModelShape(family, 128, layers, 1000, 500)


@pytest.mark.parametrize(
    ("layer", "change", "sentence"),
    [
        (ROTARY, LayerPlan(-1, 1, 8, 8), "heads is -1, it cannot be negative"),
        (ROTARY, LayerPlan(8, 4, 8, -8), "v_dim is -8, it cannot be negative"),
        (ROTARY, LayerPlan(16, 4, 8, 8), "heads is 16, the model has only 8"),
        (ROTARY, LayerPlan(7, 2, 8, 8), "7 query heads cannot share 2 key/value heads evenly"),
        (ROTARY, LayerPlan(8, 4, 7, 8), "an odd rotary width cuts a pair in half"),
        (ROTARY, LayerPlan(8, 4, 8, 0), "need kv_heads, qk_dim and v_dim of at least 1"),
        (ROTARY, LayerPlan(8, 4, 8, 8, rope_pairs=((0, 1, 2, 3),)), "must hold 4 lists of one length"),
        (ROTARY, LayerPlan(8, 1, 8, 8, rope_pairs=((0, 1, 2, 8),)), "different numbers between 0 and 7"),
        (ROTARY, LayerPlan(8, 1, 8, 8, rope_pairs=((0, 1, 2, 2),)), "different numbers between 0 and 7"),
        (ROTARY, LayerPlan(8, 1, 8, 8, rope_pairs=((0, 1, 2),)), "rotary positions keep whole pairs"),
        (PARTIAL, LayerPlan(8, 1, 16, 8, rope_pairs=((0, 1),)), "8 rotary and 8 free"),
        (PLAIN, LayerPlan(8, 8, 8, 8, rope_pairs=((0,),) * 8), "no rotary positions"),
        (ROTARY, LayerPlan(2, 1, 8, 8, kept_heads=(0,)), "must list 2 different heads"),
        (ROTARY, LayerPlan(2, 1, 8, 8, kept_heads=(0, 9)), "must lie between 0 and 7"),
        (ROTARY, LayerPlan(2, 1, 8, 8, kept_heads=(0, 2)), "must have shared one before"),
        (ROTARY, LayerPlan(2, 2, 8, 8, kept_heads=(0, 1)), "would come from the same old one"),
        (ROTARY, LayerPlan(3, 1, 8, 8), "mean merging the 4 key/value heads"),
        (MLA, LayerPlan(8, 8, 8, 8), "of latent attention (MLA) only the cache can be reduced"),
    ],
)
def test_impossible_layers_say_why(layer, change, sentence):
    with pytest.raises(InputError) as error:
        Plan.make(model(PLAIN, layer), (LayerPlan.full(PLAIN), change))
    assert "Layer 1 of the plan" in str(error.value)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (model(ROTARY, ROTARY, ROTARY), "with 2 attention layers"),
        (model(ROTARY, ROTARY, family="gpt2"), "it expects llama of width 128"),
        (model(ROTARY, PARTIAL), None),
        (model(ROTARY, PLAIN), "this one is llama of width 128"),
        (replace(model(ROTARY, ROTARY), width=64), "this one is llama of width 64"),
    ],
)
def test_a_plan_for_another_model_is_refused(other, sentence):
    plan = Plan.full(model(ROTARY, ROTARY))
    if sentence is None:
        plan.check(other)
        return
    with pytest.raises(InputError, match="made for another model") as error:
        plan.check(other)
    assert sentence in str(error.value)


def test_some_attention_must_stay():
    with pytest.raises(InputError, match="no self-attention at all"):
        Plan.make(model(PLAIN), (LayerPlan(0, 0, 0, 0),))
    cross = replace(PLAIN, cache="source")
    with pytest.raises(InputError, match="no self-attention at all"):
        Plan.make(model(PLAIN, cross), (LayerPlan(0, 0, 0, 0), LayerPlan.full(cross)))
    with pytest.raises(InputError, match="encoder-decoder"):
        Plan.make(model(PLAIN, cross), (LayerPlan.full(PLAIN), replace(LayerPlan.full(cross), dropped=True)))


@pytest.mark.parametrize("shape", [model(ROTARY, PARTIAL, PLAIN), model(PLAIN, PARTIAL)], ids=["three", "two"])
@settings(max_examples=60)
@given(data=st.data())
def test_every_plan_survives_its_file_and_never_costs_more(shape, data, tmp_path_factory):
    plan = data.draw(plans(shape))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    after = shape.planned(plan)
    assert after.attention_parameters() <= shape.attention_parameters()
    assert sum(layer.cached_per_token for layer in after.layers) <= sum(
        layer.cached_per_token for layer in shape.layers
    )


def test_the_full_plan_changes_nothing():
    shape = model(ROTARY, PARTIAL, PLAIN, MLA)
    assert shape.planned(Plan.full(shape)) == shape


def test_short_notation_and_changes_are_one_plan():
    shape = model(ROTARY, PARTIAL, PLAIN, ROTARY, ROTARY)
    short = (
        LayerPlan(8, 4, 8, 16),
        LayerPlan(0, 0, 0, 0),
        LayerPlan(8, 8, 16, 16, dropped=True),
        LayerPlan(8, 4, 16, 16),
        LayerPlan(2, 1, 16, 16, kept_heads=(6, 7)),
    )
    spelt = (
        Widths(8, 4, 8, 16),
        [Removal("attention")],
        (Removal("block"),),
        (),
        Widths(2, 1, 16, 16, kept_heads=(6, 7)),
    )
    assert Plan.make(shape, short) == Plan.make(shape, spelt)
    assert Plan.make(shape, spelt).describe() == (
        "qk dim 16 > 8",
        "no attention",
        "block dropped",
        "",
        "heads 8 > 2, kv heads 4 > 1",
    )
    assert Plan.make(shape, spelt).made_of() == ((0,), (1,), (3,), (4,))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ((Widths(0, 0, 0, 0),), "heads is 0; an attention without heads is one that is removed"),
        ((Removal("attention"), Widths(8, 4, 8, 8)), "heads is 8, the model has only 0"),
        ((Removal("attention"), Removal("block")), "expected changes of different kinds"),
        ((Removal("block"), Widths(8, 4, 8, 8)), "nothing is left for widths"),
        ((Removal("norm"),), "'norm' cannot be removed, only attention or block"),
    ],
)
def test_changes_that_do_not_go_together_say_why(changes, sentence):
    with pytest.raises(InputError, match=f"Layer 1 of the plan: .*{sentence}"):
        Plan.make(model(PLAIN, ROTARY), ((), changes))


def test_a_plan_needs_an_entry_for_every_layer():
    with pytest.raises(InputError, match="The plan has 1 layers but was made for 2"):
        Plan.make(model(PLAIN, PLAIN), ((),))


@settings(max_examples=60)
@given(data=st.data())
def test_changes_survive_json_and_keep_their_meaning(data):
    layer = data.draw(st.sampled_from([ROTARY, PARTIAL, PLAIN]))
    (change,) = data.draw(layer_plans(layer, droppable=True)).changes(layer.dims) or (Removal("block"),)
    row = json.loads(json.dumps({"kind": change.kind, **change.facts()}))
    assert read_change(Reader(row, "here")) == change
    change.check(layer, "here")
    after = change.shape(layer)
    assert after is None or (after.parameters(64) <= layer.parameters(64) and change.describe(layer))


@settings(max_examples=60)
@given(data=st.data())
def test_plans_of_the_first_versions_open_as_what_they_were(data, tmp_path_factory):
    shape = model(ROTARY, PARTIAL, PLAIN)
    rows = [data.draw(layer_plans(layer, droppable=True)) for layer in shape.layers]
    unchanged = data.draw(st.integers(0, 2))
    rows[unchanged] = LayerPlan.full(shape.layers[unchanged])
    version = data.draw(st.sampled_from([1, 2]))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    body = {
        "headwise": "plan",
        "version": version,
        "family": shape.family,
        "width": shape.width,
        "before": [layer.dims for layer in shape.layers],
        "layers": [
            {name: value for name, value in asdict(row).items() if value is not None and value is not False}
            for row in rows
        ],
        "budget": {},
        "predicted": {},
        "profile": "",
    }
    path.write_text(json.dumps(body))
    opened = Plan.load(path)
    assert opened.layers == tuple(row.changes(layer.dims) for row, layer in zip(rows, shape.layers, strict=True))
    opened.save(path)
    assert Plan.load(path) == opened and json.loads(path.read_text())["version"] == 3


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_earlier_versions_wrote(version):
    shape = ModelShape("llama", 32, (LayerShape(4, 2, 8, 8, rotary=8),) * 5, 100, 50)
    plan = Plan.load(SAMPLES / f"plan_v{version}.json")
    plan.check(shape)
    assert plan.layers == (
        (Widths(2, 1, 4, 3, rope_pairs=((0, 3),), kept_heads=(2, 3)),),
        (Removal("attention"),),
        (Removal("block"),),
        (),
        (Widths(4, 2, 6, 8),),
    )
    assert [layer.dims for layer in shape.planned(plan).layers] == [
        (2, 1, 4, 3),
        (0, 0, 0, 0),
        (4, 2, 8, 8),
        (4, 2, 6, 8),
    ]
    assert plan.predicted["loss_increase"] == 0.0125 and "damage" not in plan.predicted
    assert plan.budget["max_loss_increase"] == 0.02 and "max_damage" not in plan.budget
    assert (plan.profile, plan.fingerprint) == ("run", "abc" if version == 2 else "")


def test_a_model_to_build_that_version_2_wrote():
    dims = ((8, 8, 4, 4), (4, 2, 8, 6), (0, 0, 0, 0))
    blueprint = Blueprint(72, Text(97, 48, tied=False))
    plan = Plan.load(SAMPLES / "plan_v2_blueprint.json")
    assert plan.before == dims and plan.layers == ((), (), ())
    assert plan.shape_to_build() == blueprint.shape("llama", 32, dims)
    with pytest.raises(InputError, match="no heads, RoPE pairs or blocks to keep or drop"):
        replace(plan, layers=((Removal("block"),), (), ())).shape_to_build()


def test_plans_among_the_results_still_open():
    for path in (Path(__file__).parents[2] / "results").glob("plan_*.json"):
        plan = Plan.load(path)
        assert json.loads(path.read_text())["version"] == 1 and any(plan.layers) and plan.predicted["loss_increase"] > 0


@pytest.mark.parametrize(
    "budget", [{"keep_kv": [[]]}, {"keep_kv": "0.5"}, {"fit": 10, "batch": "two", "context": 5}, {"fit": -1}]
)
def test_a_budget_that_is_none_is_refused(budget, tmp_path):
    shape = model(PLAIN, PLAIN)
    path = tmp_path / "plan.json"
    Plan.full(shape).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "budget": budget}))
    with pytest.raises(InputError, match=r"plan\.json, budget"):
        Plan.load(path)
