"""plan, evaluate, cost and the whole line on models in memory: what the folders give."""

import pytest
import torch

from headwise.checkpoints.load import open_model
from headwise.checkpoints.profiled import Profile
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.pipelines import run
from headwise.pipelines.plans import plan
from headwise.pipelines.profile import inspect
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.plan import Plan
from headwise.records.running import RunConfig
from headwise.records.settings import CompressConfig, EvaluateConfig, InspectConfig, OpenConfig, PlanConfig
from headwise.steps import cost, evaluate
from headwise.steps.plan import make_plan
from headwise.steps.search import plan_within
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 40
SMALL = InspectConfig(tokens=96, lengths=(16, 32))
SCORED = EvaluateConfig(tokens=256, speed=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny("llama", head_dim=16).to(torch.bfloat16).save_pretrained(folder / "dense")
    save_tokenizer(folder / "dense")
    tiny("llama", seed=1, head_dim=16).save_pretrained(folder / "other")
    save_tokenizer(folder / "other")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def tokenizer(place):
    return open_tokenizer(str(place / "dense"))


@pytest.fixture(scope="module")
def measured(place, tokenizer):
    return inspect(open_model(str(place / "dense")), tokenizer, text=TEXT, config=SMALL)


def test_models_are_evaluated_as_their_folders_are(place, tokenizer):
    sources = [str(place / name) for name in ("dense", "other")]
    folders = evaluate.evaluate_folders(sources, texts=[str(place / "text.txt")], config=SCORED)
    dense, other = (open_model(source) for source in sources)
    dense.train()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    for models in (
        {"dense": dense, "other": (other, tokenizer)},
        {"dense": sources[0], "other": place / "other"},
        {"dense": sources[0], "other": other},
    ):
        scores = evaluate.evaluate(models, tokenizer, text=TEXT, config=SCORED)
        assert [model.source for model in scores.models] == ["dense", "other"]
        assert {**scores.text, "name": ""} == {**folders.text, "name": ""} and scores.settings == folders.settings
        for one, same in zip(scores.models, folders.models, strict=True):
            assert (one.loss, one.kl, one.dtype, one.parts) == (same.loss, same.kl, same.dtype, same.parts)
            assert one.cache_bytes_per_token == same.cache_bytes_per_token
    assert dense.training and dense.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    assert "perplexity" in str(scores) and "perplexity" in scores._repr_html_()


def test_speed_holds_all_models_and_gives_them_back(place, tokenizer):
    models = {name: open_model(str(place / name)) for name in ("dense", "other")}
    config = EvaluateConfig(tokens=64, speed_at=(32,))
    scores = evaluate.evaluate(models, tokenizer, text=TEXT, config=config)
    assert all(model.speed[0].context == 32 for model in scores.models)
    assert [model.dtype for model in models.values()] == [torch.bfloat16, torch.float32]


def test_labelled_examples_as_pairs(tmp_path):
    model = tiny("roberta")
    save_tokenizer(tmp_path)
    (tmp_path / "labels.tsv").write_text("0\tthe quick fox\n1\tthe lazy dog\n")
    words, pairs = open_tokenizer(str(tmp_path)), [(0, "the quick fox"), ("LABEL_1", "the lazy dog")]
    found = [
        evaluate.evaluate({"model": model}, words, text=TEXT, labels=labels, config=SCORED).models[0].accuracy
        for labels in (pairs, tmp_path / "labels.tsv")
    ]
    assert found[0] == found[1] and found[0] in (0.0, 0.5, 1.0)
    with pytest.raises(InputError, match="Row 1 of `labels`: expected a label and a text"):
        evaluate.evaluate({"model": model}, words, text=TEXT, labels=[(0, "a"), (1,)], config=SCORED)


def test_models_are_given_by_name(place, tokenizer):
    with pytest.raises(InputError, match="Give models by name"):
        evaluate.evaluate([str(place / "dense")], tokenizer)
    with pytest.raises(InputError, match="at least one model"):
        evaluate.evaluate({}, tokenizer)


def test_a_plan_of_an_object_is_that_of_its_folder_and_prints_as_a_table(measured, tmp_path):
    measured.save(tmp_path / "run")
    config = PlanConfig(multiple_of=4, protect="0", cache="none")
    chosen = plan(measured, keep_kv=0.5, config=config)
    options = {"multiple": 4, "protect": frozenset({0})}
    folder, _ = make_plan(tmp_path / "run", None, Budget("keep_kv", 0.5), **options)
    assert (chosen.layers, chosen.predicted) == (folder.layers, folder.predicted) and not chosen.profile
    assert plan(tmp_path / "run", keep_kv=0.5, config=config) == folder
    lines = str(chosen).splitlines()
    assert lines[0].split()[:2] == ["layer", "change"] and len(lines) > len(chosen.layers)
    assert "predicted loss increase" in str(chosen) and chosen._repr_html_().startswith("<pre")
    assert repr(chosen).startswith("Plan(")
    assert str(Plan.full(measured.shape)).startswith("layer") and "attention layers" in str(measured)
    with pytest.raises(InputError, match="Give a budget: `keep_kv`"):
        plan(measured)


def test_a_bound_is_measured_on_the_model_in_memory(place, tokenizer, measured, tmp_path):
    measured.save(tmp_path / "run")
    model = open_model(str(place / "dense"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = PlanConfig(multiple_of=2, cache="none")
    chosen = plan(measured, max_loss_increase=0.5, config=config, model=model)
    folder, _ = plan_within(tmp_path / "run", None, 0.5, multiple=2, opening=OpenConfig(device="cpu"))
    assert (chosen.layers, chosen.predicted) == (folder.layers, folder.predicted)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    other = "never eat soggy waffles under a bridge because trolls like them a lot " * 40
    on_text = plan(measured, max_loss_increase=0.5, config=config, model=model, tokenizer=tokenizer, text=other)
    assert on_text.predicted["measured"] <= 0.5
    with pytest.raises(InputError, match="a profile with its tensors"):
        plan(measured.record(), max_loss_increase=0.5)


def test_costs_of_models_shapes_and_sources(place, measured):
    source = str(place / "dense")
    model, chosen = open_model(source), plan(measured, keep_kv=0.5, config=PlanConfig(multiple_of=2))
    dense = cost.cost(source)
    assert cost.cost(model) == cost.cost(shape_of(model)) == dense
    assert cost.cost(model, chosen).kv_bytes_per_token <= 0.5 * dense.kv_bytes_per_token
    assert cost.cost(model, context=32, batch=2, cache_dtype="fp32").kv_bytes == 128 * dense.kv_bytes_per_token


@pytest.mark.usefixtures("reopened_here")
def test_the_whole_line_in_memory_as_in_a_folder(place, tokenizer, tmp_path, monkeypatch):
    """Also: the dense model is opened once, and comes back as it was."""
    config = RunConfig(
        inspect=SMALL,
        plan=PlanConfig(multiple_of=2),
        compress=CompressConfig(refit="outputs"),
        heal=HealConfig(tokens=256, context=32, stage="global"),
        evaluate=SCORED,
    )
    opened, real = [], run.Loaded.of.__func__.__globals__["open_model"]
    everywhere = ("checkpoints.loaded", "steps.compress", "steps.heal", "checkpoints.fingerprint")
    for name in everywhere:
        monkeypatch.setattr(
            f"headwise.{name}.open_model", lambda source, *more: opened.append(source) or real(source), raising=False
        )
    source, texts = str(place / "dense"), [str(place / "text.txt")]
    options = {"texts": texts, "eval_texts": texts, "config": config}
    _, planned, scores = run.run_folder(source, tmp_path / "out", Budget("keep_kv", 0.5), **options)
    assert opened.count(source) == 1
    model = open_model(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = run.run(model, tokenizer, keep_kv=0.5, text=TEXT, eval_text=TEXT, config=config)
    assert outcome.plan.layers == planned.layers
    assert same_profile(outcome.profile, Profile.load(tmp_path / "out"))
    folder = open_model(str(tmp_path / "out" / "model")).state_dict()
    assert all(torch.equal(tensor, folder[name]) for name, tensor in outcome.model.state_dict().items())
    assert [one.loss for one in outcome.scores.models] == [one.loss for one in scores.models]
    assert [one.source for one in outcome.scores.models] == ["dense", "reduced", "healed"]
    assert model.dtype == outcome.healed.dtype == torch.bfloat16
    file = place / "text.txt"
    again = run.run(source, keep_kv=0.5, text=file, eval_text=[file], config=config, output=tmp_path / "out")
    assert again.scores == scores and again.plan == planned
    assert all(torch.equal(tensor, folder[name]) for name, tensor in again.model.state_dict().items())
    healed = again.healed.state_dict()
    assert all(torch.equal(tensor, healed[name]) for name, tensor in outcome.healed.state_dict().items())
    with pytest.raises(InputError, match=r"give `text` as a pathlib\.Path"):
        run.run(source, text=TEXT, output=tmp_path / "out")
    with pytest.raises(InputError, match="With `output` the model is given as a folder"):
        run.run(model, output=tmp_path / "out")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def same_profile(one, other):
    assert one.layers == other.layers and one.checks == other.checks
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_the_whole_line_has_a_budget_of_its_own_and_needs_no_healing(place, tokenizer):
    config = RunConfig(inspect=InspectConfig(tokens=96, lengths=(16,), context=32), evaluate=SCORED)
    outcome = run.run(open_model(str(place / "dense")), tokenizer, text=TEXT, config=config)
    assert outcome.plan.budget["keep_kv"] == 0.75 and outcome.healed is None
    assert outcome.scores.text["context"] == 32
