"""Two commands at once on one output: one works, the other says so at once, and the result is that of one alone."""

import json
import os
import random
import shutil
import signal
import string
import sys
import time

import pytest
from safetensors.torch import load_file

from headwise.cli import main
from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Text
from headwise.reduction.build import build_reduced
from tests.commands import start
from tests.tiny import VOCAB, tiny
from tests.tokens import save_tokenizer


def here(monkeypatch, capsys, *args):
    """A command in this process: its exit code and output."""
    monkeypatch.setattr(sys, "argv", ["headwise", *map(str, args)])
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr().err


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    model = tiny("llama")
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text("".join(random.Random(0).choices(string.ascii_lowercase, k=9000)))
    shape = shape_of(model)
    cut = Plan.make(shape, (LayerPlan(4, 2, 4, 5), *map(LayerPlan.full, shape.layers[1:])))
    build_reduced(model, cut).save_pretrained(folder / "student")
    save_tokenizer(folder / "student")
    cut.save(folder / "student" / "plan.json")
    for name, width in {"wide": 48, "narrow": 32}.items():
        blueprint = Blueprint(width, Text(VOCAB, 16, tied=True))
        shape = blueprint.shape("llama", 16, ((2, 2, 8, 8),))
        Plan.make(shape, (LayerPlan(2, 2, 8, 8),), blueprint=blueprint).save(folder / f"{name}.json")
    return folder


def commands(given):
    text, small = given / "text.txt", ("--tokens", 512)
    data = ("--tokenizer", given / "model", "--data", text, "--tokens", 640, "--batch", 2, "--precision", "fp32")
    learning = ("--tokens", 640, "--context", 16, "--precision", "fp32")
    return {
        "inspect": ("inspect", given / "model", "--text", text, *small, "--lengths", "16,32"),
        "run": (
            "run",
            given / "model",
            "--text",
            text,
            *small,
            "--eval-text",
            text,
            "--eval-tokens",
            1024,
            "--no-speed",
        ),
        "heal": ("heal", given / "student", "--teacher", given / "model", "--text", text, *learning),
        "train": ("train", "--plan", given / "wide.json", *data),
        "compare": ("compare", given / "wide.json", given / "narrow.json", *data, "--seeds", 1),
    }


def wait_for(lock, process):
    """Until ``process`` has the lock and has put down its name."""
    while not lock.exists() or not lock.stat().st_size:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)


def results(folder):
    """What two runs of one command must have in common: weights, measurements, plans and curves."""
    results = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            results[name] = {key: tensor.tolist() for key, tensor in load_file(path).items()}
        elif path.name == "compare.json":
            trials = json.loads(path.read_text())["trials"]
            results[name] = [(trial["shape"], trial["loss"]) for trial in trials if trial["reading"] == "tokens"]
        elif path.suffix == ".jsonl":
            lines = map(json.loads, path.read_text().splitlines())
            results[name] = [{key: line[key] for key in ("stage", "step", "scores") if key in line} for line in lines]
        elif "-time-" not in name:  # which depends on how fast the machine was
            results[name] = path.is_file()
    return results


@pytest.mark.parametrize("name", ["inspect", "run", "heal", "train", "compare"])
def test_one_works_and_the_other_says_so(name, given, tmp_path, monkeypatch, capsys, reopened_here):
    monkeypatch.setattr("headwise.pipelines.compare.tasks.paces", lambda trainings, device: [1000.0] * len(trainings))
    command, lock = commands(given)[name], tmp_path / ".out.lock"
    with start(*command, "-o", tmp_path / "out") as first:
        wait_for(lock, first)
        os.kill(first.pid, signal.SIGSTOP)  # at work, for as long as this takes
        try:
            if name == "heal":
                second = start(*command, "-o", tmp_path / "out")
                message, code = second.communicate(timeout=300)[1], second.returncode
            else:
                code, message = here(monkeypatch, capsys, *command, "-o", tmp_path / "out")
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert code == 2, message
        assert (
            f"out is being written by process {first.pid} (headwise {name}) since " in message
            and message.count("\n") == 1
        )
        errors = first.communicate(timeout=300)[1]
    assert first.returncode == 0, errors
    assert not lock.exists()
    code, message = here(monkeypatch, capsys, *command, "-o", tmp_path / "alone")
    assert code == 0, message
    assert results(tmp_path / "out") == results(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "modules") == ["alone", "out"]


def test_a_killed_command_leaves_no_lock(given, tmp_path, monkeypatch, capsys, reopened_here):
    command = (*commands(given)["heal"], "-o", tmp_path / "out")
    with start(*command) as first:
        wait_for(tmp_path / ".out.lock", first)
        first.kill()
    code, message = here(monkeypatch, capsys, *command)
    assert code == 0, message
    shutil.rmtree(tmp_path / "modules", ignore_errors=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
