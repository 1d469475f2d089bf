"""Training from scratch: models learn, open everywhere, survive kills and full disks, and share steps."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

import headwise.steps.train
from headwise.checkpoints.load import open_model
from headwise.checkpoints.origin import plan_of
from headwise.checkpoints.save import save
from headwise.cli import app, main
from headwise.data.vocabulary import END
from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records import LayerPlan, Plan
from headwise.records.blueprint import Blueprint, Images, Text
from headwise.records.settings import TrainConfig
from headwise.steps.compress import compress
from headwise.steps.train import CURVE, train, train_model, windows
from headwise.steps.train.fitting import Task
from headwise.steps.train.pace import paces
from headwise.training.processes import join_processes
from headwise.training.work import Work
from tests import commands as cli
from tests.calls import inspect
from tests.steps.test_heal import TEXT as SENTENCES
from tests.steps.test_heal import weights
from tests.tokens import save_tokenizer

pytestmark = pytest.mark.usefixtures("reopened_here")
ALIKE, MIXED = ((4, 4, 8, 8),) * 2, ((4, 2, 8, 6), (2, 2, 16, 16))
WORDS = Blueprint(48, Text(300, 16, tied=True))
QUICK = {"tokens": 4000, "batch": 4, "evaluations": 4, "precision": "fp32", "rate": 0.01}


def write_plan(path, family="llama", blueprint=WORDS, dims=MIXED, width=32):
    shape = blueprint.shape(family, width, dims)
    Plan.make(shape, tuple(LayerPlan(*layer) for layer in dims), blueprint=blueprint).save(path)
    return path


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A plan and a text."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text.txt").write_text(SENTENCES)
    return write_plan(folder / "plan.json"), folder / "text.txt"


def curve(folder):
    return [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]


@pytest.mark.parametrize(("family", "dims"), [("llama", MIXED), ("gpt2", ALIKE)])
def test_a_decoder_learns_and_opens_everywhere(given, tmp_path, family, dims):
    plan = write_plan(tmp_path / "plan.json", family, dims=dims)
    found = train(plan, [given[1]], tmp_path / "run", config=TrainConfig(**QUICK), command="headwise train ...")
    assert found["scores"]["loss"] < 0.6 * curve(tmp_path / "run")[0]["loss"]
    assert found["scores"]["perplexity"] == pytest.approx(np.exp(found["scores"]["loss"]))
    assert not (tmp_path / "run.training").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert shape_of(model) == Plan.load(tmp_path / "run" / "plan.json").shape_to_build()
    words = AutoTokenizer.from_pretrained(tmp_path / "run")
    ids = words("the quick brown fox", return_tensors="pt")["input_ids"]
    said = words.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0])
    assert said.startswith("the quick brown fox jumps")
    assert words.eos_token_id == words.convert_tokens_to_ids(END)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == words.eos_token_id
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"Trained on {found['tokens']:,} tokens of text.txt" in card and "`headwise train ...`" in card


def test_a_classifier_of_images_learns(tmp_path):
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    pixels = (digits.images[:, None] / 8 - 1).astype(np.float32)
    by_label = digits.target.argsort(kind="stable")  # what is held out must not be a single label
    np.savez(tmp_path / "digits.npz", pixel_values=pixels[by_label], labels=digits.target[by_label])
    plan = write_plan(tmp_path / "plan.json", "vit", Blueprint(48, Images(8, 2, 1, 10)))
    config = TrainConfig(tokens=120_000, batch=32, rate=2e-3, evaluations=3, precision="fp32")
    found = train(plan, [tmp_path / "digits.npz"], tmp_path / "run", config=config)
    assert found["scores"]["accuracy"] > 0.5
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        likely = model(torch.from_numpy(pixels)).logits.argmax(-1)
    assert (likely.numpy() == digits.target).mean() > 0.5


def train_command(given, output, *options):
    plan, text = given
    quick = ["--tokens", "4000", "--lr", "0.01", "--evaluations", "5", "--precision", "fp32"]
    return ["train", "--plan", plan, "--data", text, "-o", output, *quick, *options]


def test_two_processes_do_what_one_does_with_a_double_batch(given, tmp_path):
    app(list(map(str, train_command(given, tmp_path / "one", "--batch", "4"))), standalone_mode=False)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = ["headwise", *map(str, train_command(given, tmp_path / "two", "--batch", "2"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launched, *command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = ([line.get("scores", line)["loss"] for line in curve(tmp_path / name)] for name in ("one", "two"))
    assert len(one) == len(two)
    np.testing.assert_allclose(one, two, atol=1e-3)
    for name, tensor in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, rtol=1e-2, atol=1e-3)


INTERRUPTED = """
import os, resource, signal, headwise.training.work as w
save = w.Work.save
def interrupted(self, stage, step, tensors):
    if step > 20: %s
    save(self, stage, step, tensors)
w.Work.save = interrupted
"""
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "full disk": "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))",
}
FULL_AT = {  # when the disk gets full, by how many bytes, and what is named
    "vocabulary": (windows, "learn_tokenizer", 500, "/run.training/tokenizer-"),
    "tokens": (windows, "_write_tokens", 500, "/run.training/tokens-"),
    "metrics": (Work, "log", 0, "/run.training/metrics.jsonl"),
    "model": (headwise.steps.train, "write_model", 9000, "/run"),
}


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    """A training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.headwise(*train_command(given, folder)).returncode == 0
    return folder


def test_what_was_trained_can_be_inspected_and_compressed(given, whole, tmp_path):
    profile = inspect(str(whole), tmp_path / "profile", texts=[str(given[1])], tokens=128, lengths=(8, 16))
    shape = shape_of(open_model(str(whole)))
    assert profile.shape == shape
    Plan.make(shape, (LayerPlan(4, 2, 4, 6), LayerPlan(2, 2, 8, 8))).save(tmp_path / "smaller.json")
    assert compress(str(whole), tmp_path / "smaller.json", tmp_path / "small")["missing"] == []


@pytest.mark.parametrize("end", ENDS)
def test_an_interrupted_training_goes_on_to_the_same_curve_and_weights(given, whole, tmp_path, end):
    command = train_command(given, tmp_path / "run")
    died = cli.headwise(*command, first=INTERRUPTED % ENDS[end])
    assert died.returncode == (-signal.SIGKILL if end == "killed" else 1), died.stderr
    assert "Traceback" not in died.stderr
    assert end == "killed" or "-00000024.safetensors: " in died.stderr
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "run.training").glob("global-*.safetensors"))
    app(list(map(str, command)), standalone_mode=False)
    first, again = weights(whole), weights(tmp_path / "run")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    timeless = [
        [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in curve(folder)]
        for folder in (whole, tmp_path / "run")
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("at", FULL_AT)
def test_a_full_disk_is_one_sentence_that_names_the_file(given, tmp_path, at, monkeypatch, capsys):
    place, name, size, named = FULL_AT[at]
    real, (_, most) = getattr(place, name), resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*args, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        try:
            return real(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    monkeypatch.setattr(place, name, full)
    monkeypatch.setattr(sys, "argv", ["headwise", *map(str, train_command(given, tmp_path / "run"))])
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(SystemExit) as end:
        main()
    signal.signal(signal.SIGXFSZ, before)
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.count("\n") == 1, said
    assert named in said and said.endswith(": File too large.\n"), said
    assert not (tmp_path / "run").exists()


def test_wrong_data_is_told_once_by_two_processes(given, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    command = train_command((given[0], tmp_path / "empty.txt"), tmp_path / "run")
    both = cli.together(2, lambda env: cli.start(*command, env=env))
    assert all(done.returncode for done in both)
    said = "".join(done.stderr for done in both)
    assert said.count("empty.txt holds no text: it has 0 bytes.") == 1, said
    assert "Connection closed" not in said


def test_tokens_are_made_once_and_a_tokenizer_can_be_given(given, tmp_path):
    plan, text = given
    config, told = TrainConfig(**QUICK), []
    note = lambda done, total, what: told.append(what)  # noqa: E731
    reads = Plan.load(plan).blueprint.reads
    first = windows.read_windows(reads, [text, text], None, config, tmp_path, note)
    assert {"learning a vocabulary", "reading text into tokens"} == set(told)
    told.clear()
    again = windows.read_windows(reads, [text, text], None, config, tmp_path, note)
    assert told == [] and first.sha256 == again.sha256
    inputs, wanted = again.rows(torch.tensor([0, 3]))
    assert torch.equal(inputs["input_ids"][:, 1:], wanted[:, :-1])
    words = AutoTokenizer.from_pretrained(again.tokenizer)
    assert len(words) <= 300
    everything = np.fromfile(next(tmp_path.glob("tokens-*.bin")), np.uint16)
    assert words.decode(everything) == 2 * (SENTENCES + END)
    save_tokenizer(tmp_path / "letters")
    letters = windows.read_windows(reads, [text], str(tmp_path / "letters"), config, tmp_path, note)
    wide = windows.read_windows(Text(70_000, 16, True), [text], str(tmp_path / "letters"), config, tmp_path, note)
    assert torch.equal(wide.rows(torch.arange(4))[1], letters.rows(torch.arange(4))[1])
    assert letters.sha256 != first.sha256 and letters.tokenizer == str(tmp_path / "letters")
    with pytest.raises(InputError, match="has 97 tokens, the plan's model knows 50; headwise design `vocab` 97"):
        windows.read_windows(Text(50, 16, True), [text], str(tmp_path / "letters"), config, tmp_path, note)


def test_trainings_are_timed_in_turns(given, tmp_path, monkeypatch):
    plan, config = Plan.load(given[0]), TrainConfig(**QUICK)
    examples = windows.read_windows(plan.blueprint.reads, [given[1]], None, config, tmp_path, lambda *told: None)
    device = torch.device("cpu")
    clock = itertools.count(step=0.25)  # passes by a quarter of a second whenever somebody looks
    monkeypatch.setattr("headwise.steps.train.pace.time.perf_counter", lambda: next(clock))
    speeds = paces([(plan, Task(examples, config, half)) for half in (False, True, False)], device, 2, 0.5)
    assert speeds == [2 * config.batch * 16 / 0.5] * 3


def test_trackers_that_are_not_there_are_named():
    with pytest.raises(InputError, match="tensorbord is not a tracker that Accelerate knows"):
        join_processes("tensorbord")
    with pytest.warns(UserWarning), pytest.raises(InputError, match="The tracker tensorboard is not installed here"):
        join_processes("tensorboard")


def wrong_inputs(folder):
    """What is wrong: plan, data, options, and what is said about it."""
    good = write_plan(folder / "good.json")
    text = folder / "text.txt"
    text.write_text(SENTENCES)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (folder / "cut.txt").write_bytes("caf\xe9".encode()[:-1])
    (folder / "utf16.txt").write_bytes("tea".encode("utf-16-le"))
    (folder / "short.txt").write_text("too short")
    shape = WORDS.shape("llama", 32, ALIKE)
    Plan.full(shape).save(folder / "reduces.json")
    odd = json.loads(good.read_text())
    odd["layers"][0]["kv_heads"] = 3
    (folder / "odd.json").write_text(json.dumps(odd))
    huge = json.loads(good.read_text())
    huge["blueprint"]["text"]["vocab"] = 10**12
    (folder / "huge.json").write_text(json.dumps(huge))
    few = write_plan(folder / "few.json", blueprint=Blueprint(48, Text(200, 16, tied=True)))
    images = write_plan(folder / "vit.json", "vit", Blueprint(48, Images(4, 2, 1, 3)))
    np.savez(folder / "no_labels.npz", pixel_values=np.zeros((4, 1, 4, 4), np.float32))
    np.savez(folder / "size.npz", pixel_values=np.zeros((4, 1, 5, 5), np.float32), labels=np.zeros(4, int))
    np.savez(folder / "label.npz", pixel_values=np.zeros((4, 1, 4, 4), np.float32), labels=np.arange(4))
    return [
        (good, folder / "empty.txt", (), "empty.txt holds no text: it has 0 bytes."),
        (good, folder / "latin.txt", (), "latin.txt is not UTF-8 text: invalid continuation byte at byte 3."),
        (good, folder / "cut.txt", (), "cut.txt is not UTF-8 text: unexpected end of data at byte 3."),
        (good, folder / "utf16.txt", (), "utf16.txt is not UTF-8 text: byte 1 is zero."),
        (good, folder / "short.txt", (), "Give more data or a shorter context."),
        (good, folder / "none.txt", (), "There is no file"),
        (good, folder, (), "cannot be read: Is a directory."),
        (good, text, ("--context", "17"), "A context of 17 is asked for, but the plan's model has one of 16."),
        (good, text, ("--batch", "0"), "batch must be at least 1, got 0."),
        (good, text, ("--lr", "0"), "The learning rate must be more than 0"),
        (folder / "reduces.json", text, (), "headwise design writes plans that do."),
        (folder / "odd.json", text, (), "4 query heads cannot share 3 key/value heads evenly."),
        (folder / "huge.json", text, (), "The weights of this plan take 128,000 GB in float32"),
        (few, text, (), "A vocabulary of 200 cannot hold every byte and an end of text; the least is 257."),
        (images, folder / "no_labels.npz", (), "no_labels.npz holds pixel_values; an array 'labels' is needed."),
        (images, folder / "size.npz", (), "found (4, 1, 5, 5)."),
        (images, folder / "label.npz", (), "labels must lie between 0 and 2, as in the plan."),
        (images, folder / "size.npz", ("--context", "8"), "leave out --tokenizer and --context."),
    ]


def test_wrong_inputs_get_one_sentence_and_no_output(tmp_path, monkeypatch, capsys):
    for plan, data, options, sentence in wrong_inputs(tmp_path):
        asked = ["headwise", "train", "--plan", plan, "--data", data, "-o", tmp_path / "run", *options]
        monkeypatch.setattr(sys, "argv", list(map(str, asked)))
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr().err
        assert end.value.code == 2 and sentence in said, (sentence, said)
        assert said.startswith("headwise: ") and said.count("\n") == 1, said
        assert not (tmp_path / "run").exists()


def test_what_is_there_already_stays_as_it_is(given, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        train(given[0], [given[1]], tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "run.training").exists()


def test_a_finished_training_shows_its_result_again(given, tmp_path):
    (tmp_path / "plan.json").write_bytes(given[0].read_bytes())
    first = train(given[0], [given[1]], tmp_path / "run", config=TrainConfig(**QUICK))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    again = train(tmp_path / "plan.json", [given[1]], tmp_path / "run", config=TrainConfig(**QUICK))
    assert {name: again[name] for name in ("class", "scores", "tokens")} == {
        name: first[name] for name in ("class", "scores", "tokens")
    }
    assert "finished before" in again["notes"][0]
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    for data, seed in ((given[1], 1), (tmp_path / "plan.json", 0)):  # another seed, another text
        with pytest.raises(InputError, match="exists already"):
            train(given[0], [data], tmp_path / "run", config=TrainConfig(**QUICK, seed=seed))


def test_in_memory_it_is_the_same_to_the_last_bit(given, tmp_path):
    config = TrainConfig(**{**QUICK, "tokens": 400})
    report = train(given[0], [given[1]], tmp_path / "folder", config=config)
    model = train_model(Plan.load(given[0]), data=SENTENCES, config=config)
    save(model, tmp_path / "memory")
    one, two = weights(tmp_path / "folder"), weights(tmp_path / "memory")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert plan_of(model) == Plan.load(given[0]) == Plan.load(tmp_path / "memory" / "plan.json")
    words = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("folder", "memory")]
    assert words[0].get_vocab() == words[1].get_vocab() and words[0](SENTENCES) == words[1](SENTENCES)
    card = (tmp_path / "memory" / "README.md").read_text()
    loss = report["scores"]["loss"]
    assert f"tokens of text (AdamW, learning rate 0.01, seed 0, fp32); on held-out data loss {loss:.4f}" in card


def test_data_are_texts_files_or_a_dataset(given, tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [SENTENCES[:3000], "", SENTENCES[3000:]]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.txt").write_text(texts[2])
    save_tokenizer(tmp_path / "letters")
    plan, config = Plan.load(given[0]), TrainConfig(**{**QUICK, "tokens": 64})
    words = AutoTokenizer.from_pretrained(tmp_path / "letters")
    forms = [
        (texts, words),
        ([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "letters"),
        (datasets.Dataset.from_dict({"text": texts}), str(tmp_path / "letters")),
    ]
    models = [train_model(plan, data=data, tokenizer=tokenizer, config=config) for data, tokenizer in forms]
    first, *others = [model.state_dict() for model in models]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_what_is_no_data_gets_one_sentence(given):
    datasets, plan = pytest.importorskip("datasets"), Plan.load(given[0])
    for data, sentence in (
        (str(given[1]), "give `data` as a Path"),
        ([3], "`data` must be text or files"),
        ("", "There is nothing to learn from: give `data`."),
        ("a\0b", "character 1 is zero"),
        ("\ud800", "cannot be written in UTF-8"),
        (datasets.Dataset.from_dict({"words": ["a"]}), "has the columns words; `data` needs one called text"),
    ):
        with pytest.raises(InputError, match=sentence):
            train_model(plan, data=data)
