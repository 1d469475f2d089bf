"""From a budget to shapes: all of one size, each what its paper asks for, and a recommendation by its rule."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.records import InputError, Plan
from headwise.records.blueprint import Images, Text
from headwise.records.design import Request
from headwise.steps.design import COMBINED, IDEAS, USUAL, design
from headwise.steps.design.predict import condition, rank_share, token_dim, tradeoff
from headwise.theory.hard_rank import head_dim_for_share
from headwise.theory.heads_needed import lower_bound
from headwise.theory.tradeoff import HeadGroup, allocate

SMALL = Text(8192, 1024, tied=True)
COMMON = Request("llama", 30_000_000, SMALL)


def heads(plan: Plan) -> list[HeadGroup]:
    return [HeadGroup(layer.heads, layer.qk_dim) for layer in plan.layers]


@pytest.mark.parametrize(
    ("request_", "width", "layers", "first"),
    [
        (Request("gpt2", 124_000_000, Text(50257, 1024, tied=True)), 768, 12, (12, 64)),  # GPT-2
        (Request("vit", 86_600_000, Images(224, 16, 3, 1000)), 768, 12, (12, 64)),  # ViT-B
        (Request("vit", 22_100_000, Images(224, 16, 3, 1000)), 384, 12, (6, 64)),  # ViT-S
        (COMMON, 512, 8, (8, 64)),
    ],
    ids=["GPT-2", "ViT-B", "ViT-S", "30M"],
)
def test_the_usual_shape_is_the_one_people_chose(request_, width, layers, first):
    plan = design(request_).choose(USUAL).plan
    assert (plan.width, len(plan.layers), heads(plan)[0]) == (width, layers, first)
    usual = 8 / 3 if request_.family == "llama" else 4
    assert plan.require_blueprint().mlp == pytest.approx(usual * width, rel=0.05)


requests = st.builds(
    Request,
    family=st.sampled_from(["llama", "gpt2"]),
    parameters=st.integers(400_000, 400_000_000),
    reads=st.builds(Text, vocab=st.integers(64, 8192), context=st.integers(16, 4096), tied=st.just(True)),
    kv_bytes_per_token=st.none() | st.integers(4_000, 100_000),
    intrinsic_dim=st.integers(1, 64),
)


@given(requests)
def test_all_candidates_spend_the_same_budget_and_keep_the_cache(request_):
    try:
        found = design(request_)
    except InputError as error:
        assert "the smallest" in str(error) or "the least" in str(error)
        return
    assert found.candidates[0].name == USUAL
    assert {each.name for each in found.candidates} | set(found.left_out) == {USUAL, *IDEAS}
    assert len({each.plan.layers for each in found.candidates}) == len(found.candidates)
    for candidate in found.candidates:
        spent = candidate.shape.total_parameters()
        assert spent <= request_.parameters
        one_more = 3 * (candidate.plan.width + 1) * len(candidate.plan.layers)
        assert request_.parameters - spent <= max(request_.parameters / 200, one_more)
        limit = request_.kv_bytes_per_token
        assert limit is None or candidate.cost.kv_bytes_per_token <= limit
        assert candidate.plan.predicted["parameters"] == spent
        assert Plan.full(candidate.shape).layers == candidate.plan.layers


def test_each_candidate_is_what_its_paper_asks_for():
    found = design(Request("llama", 3_000_000, Text(4096, 256, tied=True), intrinsic_dim=9))
    usual = heads(found.choose(USUAL).plan)
    inner, early = usual[0].heads * usual[0].head_dim, len(usual) // 3

    gathering = heads(found.choose("early-heads").plan)
    best = allocate(inner, token_dim(found.request.reads), found.request.lags)
    assert gathering[early:] == usual[early:]
    assert tradeoff(found.request.reads, found.request.lags, gathering[0]) == pytest.approx(best.error)

    ranked = heads(found.choose("rank-width").plan)
    assert len(set(ranked)) == 1
    assert 0 <= ranked[0].head_dim - head_dim_for_share(256, 0.75) < 8
    assert rank_share(256, ranked[0].head_dim) >= 0.75

    enough = heads(found.choose("enough-heads").plan)
    assert [group.heads for group in enough[:early]] == [9] * early
    assert enough[early:] == usual[early:]

    for name, same in (("lean-width", inner), ("lean-head-dim", 2 * inner)):
        leaner = heads(found.choose(name).plan)
        assert len(leaner) == round(len(usual) * 2 / 3)
        assert {group.heads * group.head_dim for group in leaner} == {same}
        assert leaner[0].heads == 2 * usual[0].heads


def test_fewer_layers_are_recommended_only_where_their_condition_number_falls():
    for context, lean in ((1024, False), (64, True)):
        request_ = Request("llama", 30_000_000, Text(8192, context, tied=True))
        found = design(request_)
        usual, other = (heads(found.choose(name).plan) for name in (USUAL, "lean-head-dim"))
        chosen = heads(found.choose().plan)
        assert (condition(context, other) < condition(context, usual)) is lean
        assert (len(chosen) < len(usual)) is lean


def test_more_heads_are_recommended_only_where_the_lower_bound_says_something():
    for context, dim, wanted in ((1024, 12, True), (64, 12, False)):
        request_ = Request("llama", 400_000, Text(8192, context, tied=True), lags=(0.001,), intrinsic_dim=dim)
        found = design(request_)
        first = heads(found.choose(USUAL).plan)[0]
        assert lower_bound(context, first.head_dim, first.heads, dim).vacuous is not wanted
        assert (heads(found.choose("enough-heads").plan)[0] == heads(found.choose().plan)[0]) is wanted


def test_the_recommendation_never_gathers_worse_than_the_usual_shape():
    for parameters in (500_000, 2_000_000, 9_000_000, 80_000_000):
        for lags in ((1.0,), (1.0, 1.0, 1.0, 1.0), (0.1, 2.0)):
            found = design(Request("llama", parameters, Text(2048, 512, tied=True), lags=lags))
            usual, chosen = (found.choose(name).plan.predicted["tradeoff_error"] for name in (USUAL, None))
            assert chosen <= usual


def test_where_no_idea_helps_the_usual_shape_is_recommended():
    found = design(Request("llama", 60_000, Text(256, 1024, tied=True), intrinsic_dim=1))
    assert found.recommended == USUAL
    assert found.left_out[COMBINED] == "The same as textbook."


@pytest.mark.parametrize("request_", [COMMON, Request("vit", 30_000_000, Images(32, 4, 3, 10))], ids=["llama", "vit"])
def test_the_smallest_budget_is_the_smallest(request_):
    with pytest.raises(InputError, match="the smallest, ") as error:
        design(Request(request_.family, 1, request_.reads))
    smallest = int(str(error.value).split("has ")[-1].rstrip(".").replace(",", ""))
    assert design(Request(request_.family, smallest, request_.reads)).candidates[0].shape.total_parameters() == smallest
    with pytest.raises(InputError, match="too few"):
        design(Request(request_.family, smallest - 1, request_.reads))


def test_the_smallest_cache_is_the_smallest():
    with pytest.raises(InputError, match="KV bytes per token") as error:
        design(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=10))
    least = int(str(error.value).split()[-1].rstrip("."))
    found = design(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=least))
    assert found.candidates[0].cost.kv_bytes_per_token == least
    with pytest.raises(InputError, match="the least is"):
        design(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=least - 1))


def test_json_holds_every_plan_as_it_would_be_written(tmp_path):
    found = design(COMMON)
    content = json.loads(found.json())
    assert content["recommended"] == found.recommended
    for candidate, entry in zip(found.candidates, content["candidates"], strict=True):
        (tmp_path / "plan.json").write_text(json.dumps(entry["plan"]))
        assert Plan.load(tmp_path / "plan.json") == candidate.plan
