from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.records import InputError, Latent, LayerPlan, LayerShape, ModelShape, Plan
from tests.plans import plans

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
        (MLA, LayerPlan(8, 8, 8, 8), "latent attention (MLA) can be read and costed"),
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
