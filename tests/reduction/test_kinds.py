"""A kind of reduction that headwise does not know, in one folder (`tests/toy_reduction`): from profile to page."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from headwise.checkpoints.load import open_model
from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records import LayerPlan, Plan
from headwise.records.budget import Budget
from headwise.records.profile import Profile
from headwise.records.settings import CostConfig
from headwise.reduction.build import build_reduced
from headwise.reduction.kinds import kinds, register, unregister
from headwise.reduction.plans import plan_for, slider
from headwise.reduction.reduce import reduce_model
from headwise.reduction.removal.change import Removal
from headwise.reduction.widths.change import Widths
from headwise.report.page import render
from headwise.report.plans import print_plan
from headwise.steps.cost import report_cost
from headwise.tracing.example import example_inputs
from tests.calls import inspect
from tests.commands import finished, python
from tests.report.test_scores import SCORES
from tests.tiny import tiny
from tests.tokens import save_tokenizer

PACKAGE = "tests.toy_reduction"
PHRASE = "2 of 4 query heads"
BUDGET = Budget("keep_attention_params", 0.7)


@pytest.fixture(scope="module")
def toy():
    kind = register(PACKAGE)
    yield kind.change
    unregister(kind.change.kind)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny model and its profile, in which every second query head of layers 0 and 2 is hardly felt."""
    folder = tmp_path_factory.mktemp("toy")
    tiny("llama", attention_bias=False).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog and runs away from here " * 8)
    texts = [str(folder / "text.txt")]
    inspect(str(folder / "model"), folder / "run", texts=texts, tokens=96, lengths=(16, 32))
    profile = Profile.load(folder / "run" / "profile.json")
    layers = list(profile.layers)
    for index in (0, 2):
        felt = list(layers[index].values["head_damage"])
        felt[1], felt[3] = 1e-9, 1e-9
        layers[index] = replace(layers[index], values={**layers[index].values, "head_damage": felt})
    return folder, replace(profile, layers=tuple(layers)), load_file(folder / "run" / "profile.safetensors")


def test_it_competes_with_the_kinds_that_headwise_has(toy, measured):
    profile = measured[1]
    plan = plan_for(profile, BUDGET, multiple=2)
    assert plan.layers[0] == (toy((0, 2)),) and plan.layers[2] == (toy((0, 2)),)
    assert plan.predicted["by_layer"][0] == pytest.approx(2e-9)
    assert BUDGET.measure(profile.shape.planned(plan)) <= BUDGET.limit(profile.shape)
    smaller = plan_for(profile, Budget("keep_attention_params", 0.6), multiple=2)
    assert {change.kind for changes in smaller.layers for change in changes} >= {"widths", "fewer_queries"}
    unregister(toy.kind)
    without = plan_for(profile, BUDGET, multiple=2)
    register(PACKAGE)
    assert without.predicted["loss_increase"] > 5 * plan.predicted["loss_increase"]


def test_a_plan_of_it_survives_its_file_and_is_refused_where_nobody_knows_it(toy, measured, tmp_path):
    shape = measured[1].shape
    both = (Widths(2, 2, 4, 8, rope_pairs=((0, 1),) * 2), toy((1, 3)))
    plan = Plan.make(shape, (both, toy((0, 3)), LayerPlan.full(shape.layers[2])))
    assert [change.kind for change in plan.layers[0]] == ["fewer_queries", "widths"]  # as they are applied
    assert shape.planned(plan).layers[0].dims == (2, 2, 4, 8)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    rows = json.loads((tmp_path / "plan.json").read_text())["layers"]
    assert rows[1] == {"changes": [{"kind": "fewer_queries", "kept": [0, 3]}]} and rows[2] == {"changes": []}
    with pytest.raises(InputError, match=r"Layer 1 of the plan: every key/value head must keep"):
        Plan.make(shape, ((), toy((0, 1)), ()))
    with pytest.raises(InputError, match="Layer 0 of the plan: expected changes of different kinds"):
        Plan.make(shape, ((toy((0, 2)), toy((0, 2))), (), ()))
    with pytest.raises(InputError, match="nothing is left for fewer_queries"):
        Plan.make(shape, ((Removal("block"), toy((0, 2))), (), ()))
    unregister(toy.kind)
    with pytest.raises(InputError, match=r"layers 0, changes 0: There is no kind .* known are widths, removal"):
        Plan.load(tmp_path / "plan.json")
    register(PACKAGE)


def test_it_is_applied_before_widths_and_leaves_what_it_keeps_as_it_was(toy, measured):
    folder, profile, tensors = measured
    model = open_model(str(folder / "model"))
    plan = Plan.make(profile.shape, (toy((1, 2)), (toy((0, 3)), Widths(1, 1, 4, 4)), ()))
    reduced = build_reduced(model, plan)
    assert shape_of(reduced) == profile.shape.planned(plan)
    old, new = (each.model.layers[0].self_attn for each in (model, reduced))
    rows = [*range(8, 16), *range(16, 24)]
    assert torch.equal(new.q_proj.weight, old.q_proj.weight[rows])
    assert torch.equal(new.o_proj.weight, old.o_proj.weight[:, rows])
    assert torch.equal(new.k_proj.weight, old.k_proj.weight)
    for method in ("weighted", "svd"):
        cut = build_reduced(model, plan, tensors=tensors, method=method)
        assert shape_of(cut) == profile.shape.planned(plan)
    refitted = reduce_model(model, plan, tensors, refit=("queries", "outputs"))
    assert refitted.cut is not None and shape_of(refitted.model) == profile.shape.planned(plan)


@pytest.mark.usefixtures("fresh_check")
def test_it_is_saved_reopened_costed_and_shown(toy, measured, tmp_path):
    folder, profile, tensors = measured
    source = str(folder / "model")
    plan = plan_for(profile, BUDGET, multiple=2)
    reduced = reduce_model(open_model(source), plan, tensors)
    saved = save_student(reduced.model, tmp_path / "out", plan=reduced.plan, source=source)
    assert saved["missing"] == saved["unexpected"] == []

    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| 0 | 2 | 2 | 8 | 8 | {PHRASE} |" in card

    entries = json.loads((tmp_path / "out" / "config.json").read_text())["headwise"]["layers"]
    assert entries[0]["fewer_queries"] == {"kept": [0, 2]} and "fewer_queries" not in entries[1]
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert not any(name.split('.')[0] == 'headwise' for name in sys.modules)\n"
        "print(model.config.headwise['layers'][0]['fewer_queries']['kept'], model(torch.arange(5)[None]).logits.shape)"
    )
    process = finished(python(code, tmp_path / "out", env={"HF_MODULES_CACHE": str(tmp_path / "modules")}))
    assert process.returncode == 0 and process.stdout.startswith("[0, 2] "), process.stderr
    again = open_model(str(tmp_path / "out"))
    assert shape_of(again) == profile.shape.planned(plan)
    inputs = example_inputs(again)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, reduced.model(**inputs).logits)
    with pytest.raises(InputError, match="say more of its layers than a stock config can"):
        build_reduced(open_model(source), Plan.make(profile.shape, (toy((0, 2)),) * 3), form="stock")

    plan.save(tmp_path / "plan.json")
    report = report_cost(source, tmp_path / "plan.json", CostConfig(context=64))
    assert report.after.layers[0].heads == 2 and report.changes[0] == PHRASE
    assert report.cost_after.attention_parameters == shape_of(again).attention_parameters()
    for shown in (plan, Plan.make(profile.shape, (toy((0, 2)), (), ()))):  # the second without any prediction
        printed = io.StringIO()
        print_plan(shown, profile, Console(file=printed, width=110))
        assert PHRASE in printed.getvalue()
    encoder = replace(profile.shape, layers=tuple(replace(layer, cache="none") for layer in profile.shape.layers))
    choices = slider(replace(profile, shape=encoder))  # without a cache parameters are what the slider saves
    page = render(profile, choices, SCORES, plan)
    assert f"<td>{PHRASE}</td>" in page and f'"{PHRASE}"' in page.split('id="data">')[1]


def test_kinds_are_registered_once_and_by_one_change():
    assert [kind.change for kind in kinds()][:2] == [Widths, Removal]
    assert register("headwise.reduction.widths") is kinds()[0]
    with pytest.raises(ValueError, match="must define one change, it defines 0"):
        register("tests.reduction.broken")
    with pytest.raises(ModuleNotFoundError):
        register("tests.reduction")
