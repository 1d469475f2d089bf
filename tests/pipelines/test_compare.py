"""Comparisons: three readings, nothing done twice, the same on Ray."""

import json
import signal
import sys
import warnings
from dataclasses import replace

import pytest

from headwise.cli import app
from headwise.files.errors import Failed, InputError
from headwise.pipelines.compare import HELD_OUT, _read_plans, compare, compare_plans
from headwise.pipelines.compare.tasks import Learning
from headwise.pipelines.ray import on_ray
from headwise.records.blueprint import Blueprint, Text
from headwise.records.plan import Plan
from headwise.records.settings import TrainConfig
from headwise.steps.train.fitting import Task
from tests.commands import headwise
from tests.steps.test_heal import TEXT as SENTENCES
from tests.steps.test_train import ALIKE, MIXED, write_plan

CONFIG = TrainConfig(tokens=640, batch=4, evaluations=2, precision="fp32", rate=0.01)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Two plans and a text."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text.txt").write_text(SENTENCES)
    wide = Blueprint(96, Text(300, 16, tied=True))
    plans = [write_plan(folder / "usual.json", dims=ALIKE), write_plan(folder / "other.json", blueprint=wide)]
    return plans, [folder / "text.txt"]


def steady(monkeypatch, *speeds):
    """Speeds that do not depend on the machine."""
    monkeypatch.setattr("headwise.pipelines.compare.tasks.paces", lambda trainings, device: list(speeds))


def test_three_readings_and_nothing_is_done_twice(given, tmp_path, monkeypatch):
    steady(monkeypatch, 1000.0, 1500.0)
    comparison = compare(*given, tmp_path, seeds=2, config=CONFIG)
    assert [trial.tokens for trial in comparison.trials if trial.shape == "other"] == [960, 960, 640, 640]
    usual = [(trial.reading, trial.loss) for trial in comparison.trials if trial.shape == "usual"]
    assert [loss for _, loss in usual[:2]] == [loss for _, loss in usual[2:]] and usual[0][1] != usual[1][1]
    assert [each.tokens_in_time for each in comparison.contenders] == [640, 960]
    assert "No other shape has as many parameters" in comparison.verdict("parameters")
    assert len(list((tmp_path / "tasks").iterdir())) == 6
    assert (tmp_path / "compare.html").is_file()
    written = (tmp_path / "compare.json").read_text()
    monkeypatch.setattr(Learning, "run", lambda self, progress: pytest.fail("done again"))
    assert compare(*given, tmp_path, seeds=2, config=CONFIG).trials == comparison.trials
    assert (tmp_path / "compare.json").read_text() == written


def test_shapes_of_one_speed_are_trained_once(given, tmp_path, monkeypatch):
    steady(monkeypatch, 1000.0, 1009.0)
    comparison = compare(*given, tmp_path, seeds=1, config=CONFIG)
    assert len(list((tmp_path / "tasks").iterdir())) == 2 and len(comparison.trials) == 4


def test_a_training_that_diverges_is_named(given, tmp_path, monkeypatch):
    steady(monkeypatch, 1000.0, 1009.0)
    with pytest.raises(Failed, match=r"^usual-tokens-seed0: The loss is not a number at step"):
        compare(*given, tmp_path, seeds=1, config=replace(CONFIG, rate=1e30))


KILLED = """
import os, signal, headwise.training.work as w, headwise.pipelines.compare.tasks as t
save = w.Work.save
def die(self, stage, step, tensors):
    save(self, stage, step, tensors)
    if "other-tokens" in str(self.folder): os.kill(os.getpid(), signal.SIGKILL)
w.Work.save = die
t.paces = lambda trainings, device: [1000.0, 1300.0]
"""


def test_a_killed_comparison_goes_on_from_its_checkpoint(given, tmp_path, monkeypatch):
    (usual, other), (text,) = given
    options = ["--tokens", "640", "--batch", "4", "--evaluations", "2", "--precision", "fp32", "--lr", "0.01"]
    command = ["compare", usual, other, "--data", text, "-o", tmp_path / "killed", "--seeds", "1", *options]
    assert headwise(*command, first=KILLED).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "killed" / "tasks" / "other-tokens-seed0").glob("global-*.safetensors")
    assert left.name.endswith("-00000005.safetensors")
    steps, loss = [], Task.loss
    monkeypatch.setattr(Task, "loss", lambda self, model, part: (steps.append(part), loss(self, model, part))[1])
    app(list(map(str, command)), standalone_mode=False)
    assert steps[:5] == [5, 6, 7, 8, 9]
    assert not left.exists()
    monkeypatch.undo()
    steady(monkeypatch, 1000.0, 1300.0)
    compare(*given, tmp_path / "whole", seeds=1, config=replace(CONFIG, held_out=HELD_OUT))
    first, again = (json.loads((tmp_path / name / "compare.json").read_text()) for name in ("whole", "killed"))
    assert first == again


@pytest.mark.slow
def test_on_ray_it_is_the_same_and_errors_come_through(given, tmp_path):
    ray = pytest.importorskip("ray")
    (usual, other), (text,) = given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ray's own
        try:
            far = compare([usual, other], [text], tmp_path / "far", seeds=1, config=CONFIG, on="ray")
            with pytest.raises(Failed, match=r"not a number at step 1\."):
                list(on_ray(hopeless, [1]))
        finally:
            ray.shutdown()
    here = compare([usual, other], [text], tmp_path / "here", seeds=1, config=CONFIG)
    losses = [[trial.loss for trial in comparison.trials if trial.reading == "tokens"] for comparison in (far, here)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def hopeless(_):
    raise Failed("The loss is not a number at step 1.")


def test_plans_of_one_name_are_called_after_their_folders(tmp_path):
    for name in ("wide", "deep"):
        (tmp_path / name).mkdir()
    files = [write_plan(tmp_path / name) for name in ("wide/plan.json", "deep/plan.json", "usual.json")]
    assert list(_read_plans(files)) == ["wide", "deep", "usual"]


def test_wrong_comparisons_get_a_sentence(given, tmp_path, monkeypatch):
    (usual, other), data = given
    long = write_plan(tmp_path / "long.json", blueprint=Blueprint(48, Text(300, 32, tied=True)))
    shape = Blueprint(48, Text(300, 16, tied=True)).shape("llama", 32, MIXED)
    Plan.full(shape).save(tmp_path / "reduces.json")
    for plans, sentence in (
        ([usual], "at least two plans, in files or folders of different names"),
        ([usual, usual], "at least two plans, in files or folders of different names"),
        ([usual, long], "long reads a vocabulary of 300 in contexts of 32 and usual reads"),
        ([usual, tmp_path / "reduces.json"], "reduces: This plan reduces a model"),
    ):
        with pytest.raises(InputError, match=sentence):
            compare(plans, data, tmp_path / "out")
    with pytest.raises(InputError, match="seeds must be at least 1"):
        compare([usual, other], data, tmp_path / "out", seeds=0)
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install "headwise\[ray\]"'):
        compare([usual, other], data, tmp_path / "out", config=CONFIG, on="ray")


def test_in_memory_it_says_the_same(given, tmp_path, monkeypatch):
    steady(monkeypatch, 1000.0, 1500.0)
    files, (text,) = given
    there = compare(files, [text], tmp_path, seeds=1, config=CONFIG)
    plans = {file.stem: Plan.load(file) for file in files}
    here = compare_plans(plans, data=text.read_text(), seeds=1, config=CONFIG)
    assert here.trials == there.trials and here.contenders == there.contenders and here.data == "text"
    assert [
        each.name for each in compare_plans(list(plans.values()), data=text, seeds=1, config=CONFIG).contenders
    ] == [
        "plan-1",
        "plan-2",
    ]
    for wrong, sentence in (({"../x": plans["usual"]}, "is called '../x'"), ([plans["usual"]], "at least two plans")):
        with pytest.raises(InputError, match=sentence):
            compare_plans(wrong, data=text, config=CONFIG)
