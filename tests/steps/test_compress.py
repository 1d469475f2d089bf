"""Models out of plans: every method, refits that help, odd inputs, and no half-written folder."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise.checkpoints.load import open_model
from headwise.checkpoints.origin import plan_of
from headwise.checkpoints.profile_tensors import HELD_OUT, profiled_batches
from headwise.checkpoints.profiled import Profile
from headwise.checkpoints.save import save
from headwise.checkpoints.tensor_files import open_tensors, write_tensors
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.records.settings import CompressConfig
from headwise.reduction.reduce import reduce_model
from headwise.reduction.widths import refit
from headwise.steps.compress import compress, compress_model, read_pieces
from headwise.steps.plan import make_plan
from headwise.tracing.fisher import measure_distance
from tests.calls import inspect
from tests.commands import finished, headwise, python
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 8


def prepared(folder, model, text=TEXT, tokens=96, share=0.5, multiple=2):
    """The folders of a model and its profile, and a plan."""
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text(text)
    source = str(folder / "model")
    inspect(source, folder / "run", texts=[str(folder / "text.txt")], tokens=tokens, lengths=(16,), maps=False)
    make_plan(folder / "run", folder / "plan.json", Budget("keep_kv", share), multiple=multiple)
    return source, folder / "plan.json"


def reduced(folder, *given):
    """The tensors of a profile and the student made from it, without saving."""
    source, plan = prepared(folder, *given)
    tensors = load_file(folder / "run" / "profile.safetensors")
    return tensors, reduce_model(open_model(source), Plan.load(plan), tensors).model


def distance(source, folder, run):
    return far(open_model(source), open_model(str(folder)), load_file(run / "profile.safetensors"))


def far(model, student, tensors):
    """On what was held out."""
    return measure_distance(model, student, profiled_batches(tensors, HELD_OUT)).divergence


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, *prepared(folder, tiny("llama"))


def test_every_method_gives_a_model_and_refitting_brings_it_nearer(llama, tmp_path):
    folder, source, plan = llama
    found = {}
    for name, options in {
        "svd": {"method": "svd"},
        "token-weighted": {"method": "token-weighted"},
        "weighted": {"method": "weighted", "refit": "none"},
        "refitted": {},
    }.items():
        said = compress(source, plan, tmp_path / name, config=CompressConfig(**options))
        assert said["refit"] == (["queries", "outputs"] if name == "refitted" else [])
        found[name] = distance(source, tmp_path / name, folder / "run")
    assert found["refitted"] < found["weighted"] < found["svd"]
    card = (tmp_path / "refitted" / "README.md").read_text()
    assert "queries and outputs refitted by least squares" in card


def test_a_plan_that_keeps_everything_changes_nothing(llama, tmp_path):
    folder, source, plan = llama
    whole = Plan.load(plan)
    full = replace(whole, layers=((),) * len(whole.layers), budget={}, predicted={}, fingerprint="")
    full.save(tmp_path / "full.json")
    assert compress(source, tmp_path / "full.json", tmp_path / "out")["refit"] == []
    assert distance(source, tmp_path / "out", folder / "run") == pytest.approx(0, abs=1e-6)


def test_a_crash_in_the_middle_leaves_no_folder(llama, tmp_path, monkeypatch):
    _, source, plan = llama

    def crash(*args, **kwargs):
        raise RuntimeError("power cut")

    monkeypatch.setattr(refit, "fit_queries", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        compress(source, plan, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(dtype, tmp_path):
    source, plan = prepared(tmp_path, tiny("llama").to(dtype))
    compress(source, plan, tmp_path / "out")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert student.dtype == dtype
    assert torch.isfinite(student(torch.arange(3, 20)[None]).logits).all()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("the " * 200, 64), (TEXT, 16)],
    ids=["constant text", "fewer tokens than widths"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_poor_statistics_give_finite_models(name, text, tokens, tmp_path):
    _, student = reduced(tmp_path, tiny(name), text, tokens)
    assert all(tensor.isfinite().all() for tensor in student.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_heads_of_zeros_are_cut_like_others(name, tmp_path):
    model = tiny(name)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "layers.0.self_attn" in key or "h.0.attn" in key:
                tensor.zero_()
    tensors, student = reduced(tmp_path, model)
    assert far(model, student, tensors) < 1


def test_weights_that_are_not_numbers_are_refused(llama, tmp_path):
    _, _, plan = llama
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    body = json.loads(plan.read_text())
    del body["fingerprint"]  # which would refuse it as another model
    (tmp_path / "plan.json").write_text(json.dumps(body))
    with pytest.raises(InputError, match="not all finite"):
        compress(str(tmp_path / "nan"), tmp_path / "plan.json", tmp_path / "out", config=CompressConfig(method="svd"))
    assert not (tmp_path / "out").exists()


def test_a_profile_without_its_text_can_be_cut_but_not_refitted(llama, tmp_path):
    folder, source, plan = llama
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.json").write_text((folder / "run" / "profile.json").read_text())
    facts, tensors = open_tensors(folder / "run" / "profile.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("inputs.")}
    write_tensors(tmp_path / "run" / "profile.safetensors", kept, facts)
    with pytest.raises(InputError, match="inspect the model again"):
        compress(source, plan, tmp_path / "out", profile=tmp_path / "run")
    compress(source, plan, tmp_path / "out", profile=tmp_path / "run", config=CompressConfig(refit="none"))


def test_refitting_without_a_profile_is_refused(llama, tmp_path):
    _, source, plan = llama
    body = json.loads(plan.read_text())
    body["profile"] = ""
    (tmp_path / "plan.json").write_text(json.dumps(body))
    with pytest.raises(InputError, match="Fitting needs the text of a profile"):
        compress(source, tmp_path / "plan.json", tmp_path / "out", config=CompressConfig(refit="outputs"))


@pytest.mark.parametrize("text", ["", "query", "queries,temperature"])
def test_unknown_pieces_are_refused(text):
    with pytest.raises(InputError, match="Fit queries or temperature"):
        read_pieces(text)
    assert read_pieces("none") == ()
    assert read_pieces("temperature, outputs") == ("temperature", "outputs")


def same_bits(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_memory_it_is_the_same_to_the_last_bit_and_the_model_stays_as_it_was(tmp_path, dtype):
    source, plan = prepared(tmp_path, tiny("llama").to(dtype))
    assert headwise("compress", source, "--plan", plan, "-o", tmp_path / "folder").returncode == 0
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.lm_head.requires_grad_(False)
    before, tensors = open_model(source), list(model.parameters())
    small = compress_model(model, Plan.load(plan), Profile.load(tmp_path / "run"))
    save(small, tmp_path / "memory", tokenizer=AutoTokenizer.from_pretrained(source))
    whole, alone = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("folder", "memory")
    )
    assert same_bits(whole, alone) and same_bits(small, alone)
    assert same_bits(model, before) and small.dtype == model.dtype == dtype
    assert all(one is other for one, other in zip(model.parameters(), tensors, strict=True))
    assert not model.lm_head.weight.requires_grad and small.lm_head.weight.requires_grad
    own = {parameter.data_ptr() for parameter in small.parameters()}
    assert not own & {parameter.data_ptr() for parameter in model.parameters()}
    assert (
        Plan.load(tmp_path / "folder" / "plan.json") == Plan.load(tmp_path / "memory" / "plan.json") == plan_of(small)
    )
    cards = [(tmp_path / name / "README.md").read_text() for name in ("folder", "memory")]
    assert [line for line in cards[0].splitlines() if "headwise compress" not in line] == [
        line for line in cards[1].splitlines() if not line.startswith("Made from")
    ]
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("folder", "memory")]
    assert files[0] == files[1]


def test_a_model_in_training_is_reduced_as_one_that_is_not(llama):
    _, source, plan = llama
    model = open_model(source)
    calm = compress_model(model, Plan.load(plan))
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    small = compress_model(model.train(), Plan.load(plan))
    assert small.training and model.training and same_bits(small, calm)


def test_without_a_profile_the_one_the_plan_names_is_taken_and_the_weights_decide_where_it_is_gone(llama):
    folder, source, plan = llama
    model, plan = open_model(source), Plan.load(plan)
    assert same_bits(compress_model(model, plan), compress_model(model, plan, Profile.load(folder / "run")))
    alone = compress_model(model, replace(plan, profile=""))
    assert same_bits(alone, compress_model(model, plan, config=CompressConfig(method="svd")))
    with pytest.raises(InputError, match="name their folder with `profile`"):
        compress_model(model, replace(plan, profile=""), config=CompressConfig(method="weighted"))


def test_what_belongs_to_another_model_is_refused_in_memory_too(llama):
    folder, _, plan = llama
    other = tiny("llama", seed=1)
    with pytest.raises(InputError, match="`plan` was made for another model: `model` has the same shape"):
        compress_model(other, Plan.load(plan))
    with pytest.raises(InputError, match="`profile` holds the profile of another model: `model` has the same shape"):
        compress_model(other, replace(Plan.load(plan), fingerprint=""), Profile.load(folder / "run"))
    wider = tiny("llama", intermediate_size=64)
    with pytest.raises(InputError, match="`profile` holds the profile of another model"):
        compress_model(wider, replace(Plan.load(plan), fingerprint=""), Profile.load(folder / "run"))


def test_a_reduced_model_is_reduced_again_and_knows_its_last_plan(llama, tmp_path):
    _, source, plan = llama
    small = compress_model(open_model(source), Plan.load(plan))
    shape = shape_of(small)
    again = Plan.make(shape, (LayerPlan(0, 0, 0, 0), *map(LayerPlan.full, shape.layers[1:])))
    smaller = compress_model(small, again)
    assert shape_of(smaller).layers[0].heads == 0 and shape_of(small).layers[0].heads
    save(smaller, tmp_path / "out")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    )


def test_the_other_way_to_save_gives_what_opens_with_and_without_headwise(llama, tmp_path):
    _, source, plan = llama
    small = compress_model(open_model(source), Plan.load(plan))
    small.save_pretrained(tmp_path / "out")
    assert same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), small)
    code = (
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=True)\n"
        "assert 'headwise' not in sys.modules\nprint(sum(p.double().sum().item() for p in model.parameters()))"
    )
    done = finished(python(code))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(p.double().sum().item() for p in small.parameters())
