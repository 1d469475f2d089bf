"""Profiles, plans, teachers and tensors belong to one model, and the files of a training to what made them."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.checkpoints.fingerprint import fingerprint
from headwise.checkpoints.load import open_model
from headwise.checkpoints.profiled import PROFILE, TENSORS
from headwise.checkpoints.tensor_files import open_tensors, write_tensors
from headwise.cli import main
from headwise.files.errors import InputError
from headwise.records.blueprint import Text
from headwise.records.budget import Budget
from headwise.records.plan import Plan
from headwise.records.profile import Profile
from headwise.records.settings import TrainConfig
from headwise.steps.compress import compress
from headwise.steps.heal import heal
from headwise.steps.heal.teacher import Memory
from headwise.steps.plan import make_plan
from headwise.steps.search import plan_within
from headwise.steps.train import windows
from tests.calls import inspect
from tests.tiny import tiny
from tests.tokens import save_tokenizer
from tests.training.test_trust import edit

pytestmark = pytest.mark.usefixtures("reopened_here")
TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two models of one shape with their profiles and plans: a, a-profile, a.json, b, ..."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "text.txt").write_text(TEXT)
    for seed, name in enumerate("ab"):
        tiny("llama", seed=seed, head_dim=16).save_pretrained(folder / name)
        save_tokenizer(folder / name)
        options = {"texts": [str(folder / "text.txt")], "tokens": 96, "lengths": (16, 32), "maps": False}
        inspect(str(folder / name), folder / f"{name}-profile", **options)
        make_plan(folder / f"{name}-profile", folder / f"{name}.json", Budget("keep_kv", 0.75))
    return folder


def without_fingerprint(plan, target):
    body = json.loads(plan.read_text())
    del body["fingerprint"]
    target.write_text(json.dumps(body))
    return target


def test_profile_tensors_plan_and_reduced_model_name_the_weights_they_are_of(pair, tmp_path):
    own = fingerprint(open_model(str(pair / "a")))
    profile = Profile.load(pair / "a-profile" / PROFILE)
    facts, _ = open_tensors(pair / "a-profile" / TENSORS)
    assert profile.fingerprint == facts["fingerprint"] == Plan.load(pair / "a.json").fingerprint == own
    assert facts["inputs_hash"] == profile.inputs_hash
    plan = without_fingerprint(pair / "a.json", tmp_path / "plan.json")
    assert Plan.load(plan).fingerprint == ""
    assert compress(str(pair / "a"), plan, tmp_path / "out")["notes"] == []
    assert Plan.load(tmp_path / "out" / "plan.json").fingerprint == own


def test_a_profile_remembers_where_its_model_is_whatever_folder_it_was_measured_from(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(pair)
    options = {"texts": ["text.txt"], "tokens": 32, "lengths": (16,), "maps": False}
    assert inspect("a", tmp_path / "run", **options).model["source"] == str((pair / "a").resolve())


def test_a_plan_or_profile_of_another_model_is_refused(pair, tmp_path, monkeypatch, capsys):
    asked = ["headwise", "compress", pair / "b", "--plan", pair / "a.json", "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, asked)))
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"a.json was made for another model: {pair / 'b'} has the same shape, but other weights." in said
    with pytest.raises(InputError, match="b-profile holds the profile of another model"):
        compress(str(pair / "a"), pair / "a.json", tmp_path / "out", profile=pair / "b-profile")
    assert not (tmp_path / "out").exists()


def test_tensors_of_another_profile_and_changed_ones_are_refused(pair, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pair / "a-profile", run)
    shutil.copy(pair / "b-profile" / TENSORS, run / TENSORS)
    with pytest.raises(InputError, match=r"profile\.safetensors is not of the measurement that .*profile\.json tells"):
        compress(str(pair / "a"), pair / "a.json", tmp_path / "out", profile=run)
    shutil.copy(pair / "a-profile" / TENSORS, run / TENSORS)
    edit(run / TENSORS)
    with pytest.raises(InputError, match=r"profile\.safetensors was changed since headwise wrote it"):
        compress(str(pair / "a"), pair / "a.json", tmp_path / "out", profile=run)
    assert not (tmp_path / "out").exists()


def test_a_profile_from_before_fingerprints_still_serves_with_a_note(pair, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    body = json.loads((pair / "a-profile" / PROFILE).read_text())
    del body["model"]["fingerprint"]
    (run / PROFILE).write_text(json.dumps(body))
    facts, tensors = open_tensors(pair / "a-profile" / TENSORS)
    del facts["fingerprint"]
    write_tensors(run / TENSORS, tensors, facts)
    plan = without_fingerprint(pair / "a.json", tmp_path / "plan.json")
    (note,) = compress(str(pair / "a"), plan, tmp_path / "out", profile=run)["notes"]
    assert "does not say which weights it was measured on" in note


def test_a_teacher_of_the_same_shape_is_not_the_teacher(pair, tmp_path):
    compress(str(pair / "a"), pair / "a.json", tmp_path / "student")
    with pytest.raises(InputError, match=r"student was not cut from .*b: it has the same shape, but other weights\."):
        heal(str(tmp_path / "student"), str(pair / "b"), tmp_path / "out", texts=[str(pair / "text.txt")])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.healing").exists()


def test_a_model_that_was_trained_on_since_is_not_planned_for(pair, tmp_path):
    shutil.copytree(pair / "a", tmp_path / "a")
    options = {"texts": [str(pair / "text.txt")], "tokens": 32, "lengths": (16,), "maps": False}
    inspect(str(tmp_path / "a"), tmp_path / "run", **options)
    shutil.copy(pair / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match="holds the profile of another model"):
        plan_within(tmp_path / "run", None, 0.1, texts=[str(pair / "text.txt")])


def test_what_a_teacher_said_is_asked_again_where_it_was_changed(tmp_path):
    memory, rows, logits = Memory(tmp_path / "teacher", "ab" * 32, 4, 16), torch.tensor([2, 0]), torch.randn(2, 4, 16)
    assert memory.read(rows) is None
    memory.write(rows, logits, 1.0)
    known = memory.read(rows)
    assert known is not None and memory.read(torch.tensor([1])) is None
    raw = bytearray(memory.path.read_bytes())
    raw[3] ^= 1
    memory.path.write_bytes(raw)
    assert memory.read(rows) is None and memory.read(rows[:1]) is not None
    memory.write(rows, logits, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(memory.read(rows), known, strict=True))


def test_tokens_and_vocabularies_that_were_changed_are_made_again(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    told = []

    def read():
        told.clear()
        note = lambda done, total, what: told.append(what)  # noqa: E731
        found = windows.read_windows(Text(300, 16, True), [text], None, TrainConfig(), tmp_path / "work", note)
        return found.rows(torch.arange(found.count))[1]

    whole = read()
    assert set(told) == {"learning a vocabulary", "reading text into tokens"}
    assert torch.equal(read(), whole) and told == []
    (tokens,) = (tmp_path / "work").glob("tokens-*.bin")
    for spoil in (
        lambda: np.zeros(400, np.uint16).tofile(tokens),
        lambda: tokens.write_bytes(b""),
        lambda: tokens.write_bytes(tokens.read_bytes() + b"odd"),
        lambda: tokens.with_name(f"{tokens.name}.sha256").unlink(),
        lambda: tokens.with_name(f"{tokens.name}.sha256").write_bytes(b"\xff"),
    ):
        spoil()
        assert torch.equal(read(), whole) and set(told) == {"reading text into tokens"}
    (words,) = (path for path in (tmp_path / "work").glob("tokenizer-*") if path.is_dir())
    body = json.loads((words / "tokenizer.json").read_text())
    body["model"]["merges"] = body["model"]["merges"][:3]
    (words / "tokenizer.json").write_text(json.dumps(body))
    assert torch.equal(read(), whole) and "learning a vocabulary" in told
    assert Path(words / "tokenizer.json").is_file()
