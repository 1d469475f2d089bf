"""From a budget to shapes: all of one size, each what it says it is, and a recommendation by what was measured."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.records import InputError, Plan
from headwise.records.blueprint import Images, Text
from headwise.records.design import FORMULA_ONLY, MEASURED, Apart, Measured, Request
from headwise.steps.design import IDEAS, USUAL, design, evidence, propose
from headwise.steps.design.predict import rank_share, tradeoff
from headwise.steps.design.usual import head_dims
from headwise.theory.tradeoff import HeadGroup

SHAPES = Path(__file__).parents[2] / "results" / "shapes.json"
SMALL = Text(8192, 1024, tied=True)
COMMON = Request("llama", 30_000_000, SMALL)


def heads(plan: Plan) -> list[HeadGroup]:
    return [HeadGroup(layer.heads, layer.qk_dim) for layer in plan.shape_to_build().layers]


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
    plan = propose(request_).choose(USUAL).plan
    assert (plan.width, len(plan.layers), heads(plan)[0]) == (width, layers, first)
    usual = 8 / 3 if request_.family == "llama" else 4
    assert plan.require_blueprint().mlp == pytest.approx(usual * width, rel=0.05)


requests = st.builds(
    Request,
    family=st.sampled_from(["llama", "gpt2"]),
    parameters=st.integers(400_000, 400_000_000),
    reads=st.builds(Text, vocab=st.integers(64, 8192), context=st.integers(16, 4096), tied=st.just(True)),
    kv_bytes_per_token=st.none() | st.integers(4_000, 100_000),
    intrinsic_dim=st.none() | st.integers(1, 64),
)


@given(requests)
def test_all_candidates_spend_the_same_budget_and_keep_the_cache(request_):
    try:
        found = propose(request_)
    except InputError as error:
        assert "the smallest" in str(error) or "the least" in str(error)
        return
    assert found.candidates[0].name == USUAL
    assert {each.name for each in found.candidates} | set(found.left_out) == {USUAL, *IDEAS}
    assert len({(each.plan.width, each.plan.before) for each in found.candidates}) == len(found.candidates)
    for candidate in found.candidates:
        spent = candidate.shape.total_parameters()
        assert spent <= request_.parameters
        one_more = 3 * (candidate.plan.width + 1) * len(candidate.plan.layers)
        assert request_.parameters - spent <= max(request_.parameters / 200, one_more)
        limit = request_.kv_bytes_per_token
        assert limit is None or candidate.cost.kv_bytes_per_token <= limit
        assert candidate.plan.predicted["parameters"] == spent
        assert Plan.full(candidate.shape).before == candidate.plan.before


@given(requests)
def test_heads_are_as_wide_as_kernels_like_and_only_what_was_measured_is_recommended(request_):
    try:
        found = propose(request_)
    except InputError:
        return
    for candidate in found.candidates:
        widths = {layer.qk_dim for layer in candidate.shape.layers}
        assert widths <= set(head_dims(candidate.plan.width))
        assert candidate.plan.width < 256 or widths <= {32, 64, 128}
    assert found.recommended in {USUAL, "lean-width"}
    usual, chosen = found.candidates[0], found.choose()
    assert chosen.evidence == MEASURED or chosen is usual
    assert chosen is usual or chosen.plan.width == usual.plan.width
    assert chosen.cost.kv_bytes_per_token <= usual.cost.kv_bytes_per_token


def test_each_candidate_is_what_its_paper_asks_for():
    found = propose(Request("llama", 3_000_000, Text(4096, 256, tied=True), intrinsic_dim=9))
    reads, lags = found.request.reads, found.request.lags
    usual = heads(found.choose(USUAL).plan)
    inner, early = usual[0].heads * usual[0].head_dim, len(usual) // 3
    cuts = [HeadGroup(inner // dim, dim) for dim in head_dims(found.candidates[0].plan.width)]

    gathering = heads(found.choose("early-heads").plan)
    assert gathering[early:] == usual[early:]
    assert tradeoff(reads, lags, gathering[0]) == min(tradeoff(reads, lags, cut) for cut in cuts)

    ranked = heads(found.choose("rank-width").plan)
    assert len(set(ranked)) == 1
    assert ranked[0].head_dim == min(cut.head_dim for cut in cuts if rank_share(reads, cut.head_dim) >= 0.75)

    assert found.left_out["enough-heads"] == "The same as early-heads."
    assert gathering[0].heads >= 9 > usual[0].heads

    for name, same in (("lean-width", inner), ("lean-head-dim", 2 * inner)):
        leaner = heads(found.choose(name).plan)
        assert len(leaner) == round(len(usual) * 2 / 3)
        assert {group.heads * group.head_dim for group in leaner} == {same}
        assert leaner[0].heads == 2 * usual[0].heads


@pytest.mark.parametrize(
    ("parameters", "vocab", "layers", "width", "dims", "mlp"),
    [(134_515_008, 49152, 30, 576, (9, 3, 64), 1536), (124_635_456, 32000, 30, 576, (9, 3, 64), 1536)],
    ids=["SmolLM2-135M", "MobileLLM-125M"],
)
def test_deep_and_thin_is_the_shape_of_models_in_use(parameters, vocab, layers, width, dims, mlp):
    candidate = propose(Request("llama", parameters, Text(vocab, 2048, tied=True))).choose("deep-thin")
    plan = candidate.plan
    assert (len(plan.layers), plan.width, plan.require_blueprint().mlp) == (layers, width, mlp)
    assert {layer.dims[:3] for layer in candidate.shape.layers} == {dims}
    assert candidate.shape.total_parameters() == parameters


def test_deep_and_thin_is_left_out_where_the_usual_shape_is():
    found = propose(Request("llama", 2_492_506, Text(63_932, 4_789, tied=True)))
    assert found.left_out["deep-thin"] == "24 layers of width 32 are deep and thin already."


def test_grouped_queries_share_keys_and_values_as_models_in_use_do():
    groups = {}
    for parameters in (1_500_000, 12_000_000, 30_000_000, 135_000_000, 600_000_000):
        found = propose(Request("llama", parameters, SMALL))
        usual, shared = found.choose(USUAL), found.choose("grouped")
        first = shared.shape.layers[0]
        assert (shared.plan.width, len(shared.plan.layers)) == (usual.plan.width, len(usual.plan.layers))
        assert shared.cost.kv_bytes_per_token < 0.6 * usual.cost.kv_bytes_per_token
        assert first.heads - usual.shape.layers[0].heads in {0, 1}
        groups[first.heads] = first.heads // first.kv_heads
    assert {count: 3 if count % 3 == 0 else 2 for count in groups} == groups


def test_the_figures_are_those_of_the_file():
    content = json.loads(SHAPES.read_text())
    for name, found in evidence.TRAINED.items():
        for reading, apart in (("tokens", found.tokens), ("time", found.time)):
            outcome = content["readings"][reading]["outcomes"][name]
            assert apart == (round(outcome["difference"], 3), round(outcome["margin"], 3))
    config = content["settings"]
    seeds = len(content["seeds"])
    data = f"context {config['context']}, {config['tokens']:,} tokens, {seeds} seeds"
    assert evidence.WHERE.startswith(f"llamas of 1.5M parameters, {data}, on one CPU") and content["threads"] == 1


def test_what_was_measured_is_what_is_proposed():
    found = propose(Request("llama", 1_500_000, Text(1024, 256, tied=True)))
    contenders = {each["name"]: each["parameters"] for each in json.loads(SHAPES.read_text())["contenders"]}
    for name in evidence.TRAINED:
        candidate = found.choose(name)
        assert candidate.shape.total_parameters() == contenders[name]
        assert candidate.measured == evidence.TRAINED[name]
    rest = [each for each in found.candidates if each.name not in evidence.TRAINED]
    assert rest and all(each.evidence == FORMULA_ONLY for each in rest)


def test_135m_gets_the_shape_that_won_at_equal_time_and_its_cache_is_told():
    found = propose(Request("llama", 135_000_000, Text(49152, 8192, tied=True)))
    usual, chosen = found.candidates[0], found.choose()
    assert (chosen.name, chosen.evidence) == ("lean-width", MEASURED)
    assert set(heads(chosen.plan)) == {(24, 32)} and len(chosen.plan.layers) == 9
    assert (chosen.plan.width, usual.plan.width) == (768, 768)
    assert (chosen.cost.kv_bytes_per_token, usual.cost.kv_bytes_per_token) == (27_648, 43_008)
    for said in (
        "Equal wall-clock decides",
        "-0.103 +- 0.075",
        "at equal tokens",
        "results/shapes.json",
        "36% smaller",
    ):
        assert said in found.because
    assert not any(layer.heads == 112 or layer.qk_dim < 32 for each in found.candidates for layer in each.shape.layers)


@pytest.mark.parametrize(
    "request_",
    [
        Request("gpt2", 124_000_000, Text(50257, 1024, tied=True)),
        Request("vit", 30_000_000, Images(32, 4, 3, 10)),
        Request("llama", 135_000_000, Text(49152, 8192, tied=True), kv_bytes_per_token=10_000),
        Request("llama", 60_000, Text(256, 1024, tied=True)),
    ],
    ids=["gpt2", "vit", "shared keys and values", "very narrow heads"],
)
def test_where_nothing_like_it_was_trained_the_usual_shape_is_recommended(request_):
    found = propose(request_)
    assert found.recommended == USUAL
    assert "Nothing that was measured speaks for another shape" in found.because
    assert all(each.evidence == FORMULA_ONLY for each in found.candidates if each.name == "lean-width")


def test_a_shape_that_was_measured_to_be_worse_is_never_recommended(monkeypatch):
    monkeypatch.setattr(
        evidence, "TRAINED", {**evidence.TRAINED, "lean-width": Measured("f", "w", Apart(0, 1), Apart(-0.1, 0.2))}
    )
    found = propose(COMMON)
    assert found.recommended == USUAL
    assert found.choose("lean-head-dim").measured == evidence.TRAINED["lean-head-dim"]


def test_no_look_ups_are_assumed():
    found = propose(Request("llama", 400_000, Text(8192, 1024, tied=True)))
    assert "`intrinsic_dim`" in found.left_out["enough-heads"]
    assert all(each.plan.predicted["lookup_exponent"] is None for each in found.candidates)
    known = propose(Request("llama", 400_000, Text(8192, 1024, tied=True), intrinsic_dim=12))
    assert known.candidates[0].plan.predicted["lookup_exponent"] > 0


def test_texts_are_ranked_by_the_causal_formula_and_images_by_the_other():
    assert rank_share(Text(64, 1024, tied=True), 48) == pytest.approx(0.851, abs=0.012)  # of notes, simulated
    assert rank_share(Images(31, 1, 3, 10), 48) == pytest.approx(0.773, abs=0.005)


@pytest.mark.parametrize("request_", [COMMON, Request("vit", 30_000_000, Images(32, 4, 3, 10))], ids=["llama", "vit"])
def test_the_smallest_budget_is_the_smallest(request_):
    with pytest.raises(InputError, match="the smallest, ") as error:
        propose(Request(request_.family, 1, request_.reads))
    smallest = int(str(error.value).split("has ")[-1].rstrip(".").replace(",", ""))
    assert (
        propose(Request(request_.family, smallest, request_.reads)).candidates[0].shape.total_parameters() == smallest
    )
    with pytest.raises(InputError, match="too few"):
        propose(Request(request_.family, smallest - 1, request_.reads))


def test_the_smallest_cache_is_the_smallest():
    with pytest.raises(InputError, match="KV bytes per token") as error:
        propose(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=10))
    least = int(str(error.value).split()[-1].rstrip("."))
    found = propose(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=least))
    assert found.candidates[0].cost.kv_bytes_per_token == least
    with pytest.raises(InputError, match="the least is"):
        propose(Request("llama", 30_000_000, SMALL, kv_bytes_per_token=least - 1))


def test_json_holds_every_plan_as_it_would_be_written(tmp_path):
    found = propose(COMMON)
    content = json.loads(found.json())
    assert (content["recommended"], content["because"]) == (found.recommended, found.because)
    for candidate, entry in zip(found.candidates, content["candidates"], strict=True):
        assert entry["evidence"] == candidate.evidence
        assert ("measured" in entry) is (candidate.evidence == MEASURED)
        (tmp_path / "plan.json").write_text(json.dumps(entry["plan"]))
        assert Plan.load(tmp_path / "plan.json") == candidate.plan
    measured = {entry["name"]: entry["measured"] for entry in content["candidates"] if "measured" in entry}
    assert measured["lean-width"]["file"] == "results/shapes.json"
    assert measured["lean-width"]["nats"]["equal wall-clock"] == {"difference": -0.103, "margin": 0.075}


def test_the_function_takes_what_the_command_takes():
    proposal = design(3_000_000, vocab=4096, context=256, intrinsic_dim=9)
    assert proposal == propose(Request("llama", 3_000_000, Text(4096, 256, tied=True), intrinsic_dim=9))
    images = design(params=3_000_000, family="vit", image_size=32, patch_size=4, labels=10)
    assert images.request.reads == Images(32, 4, 3, 10)
    with pytest.raises(InputError, match="A vit model reads images: leave out `vocab`, `context`"):
        design(3_000_000, family="vit", vocab=100, context=8)
    with pytest.raises(InputError, match="`family` must be llama"):
        design(3_000_000, family="mamba")


def test_a_usual_shape_unlike_what_was_trained_is_no_measure():
    """Under this limit the usual shape shares keys and values, so nothing was trained against its like."""
    proposal = propose(Request("llama", 1_520_620, Text(64, 16, tied=True), kv_bytes_per_token=4000))
    assert proposal.candidates[0].measured is None and proposal.choose("lean-width").measured is not None
    assert proposal.recommended == USUAL and "Nothing that was measured" in proposal.because
