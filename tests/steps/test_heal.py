"""Healing: every way of learning brings a cut model nearer, none makes it worse, and no work is lost."""

import itertools
import json
import shutil
import signal

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertModel

from headwise.checkpoints.load import open_model
from headwise.checkpoints.origin import Origin, plan_of, remember
from headwise.checkpoints.save import save
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.files.errors import Failed, InputError
from headwise.records import LayerPlan, Plan
from headwise.records.healing import HealConfig
from headwise.records.settings import ReadConfig
from headwise.reduction.flatten.change import Flatten
from headwise.steps.compress import compress
from headwise.steps.heal import CURVE, heal, heal_model, local
from headwise.steps.heal.teacher import Memory, Teacher
from headwise.steps.heal.windows import read_windows
from headwise.training.loop import fit
from headwise.training.work import Work
from tests.commands import headwise, start, together
from tests.tiny import tiny
from tests.tokens import save_tokenizer

pytestmark = pytest.mark.usefixtures("reopened_here")
TEXT = (
    " ".join(
        f"the {a} {b} jumps over the lazy {c}"
        for a in ["quick", "brown", "red"]
        for b in ["fox", "cat", "dog"]
        for c in ["dog", "cow", "hen", "pig"]
    )
    * 6
)
QUICK = {
    "tokens": 2400,
    "context": 16,
    "batch": 3,
    "held_out": 96,
    "evaluations": 4,
    "local_tokens": 480,
    "precision": "fp32",
}


def prepared(folder, name="llama", build=tiny):
    """A tiny model with logits worth learning, and what is left of it after a cut by its weights alone."""
    torch.manual_seed(0)
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.ndim > 1 else None
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    shape = shape_of(model)
    layers = tuple(
        LayerPlan(old.heads, old.kv_heads, max(2, old.qk_dim // 2), max(1, old.v_dim // 2)) for old in shape.layers[:2]
    )
    plan = Plan.make(shape, (*layers, *map(LayerPlan.full, shape.layers[2:])))
    plan.save(folder / "plan.json")
    compress(str(folder / "model"), folder / "plan.json", folder / "student")
    return str(folder / "student"), str(folder / "model")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return folder, *prepared(folder)


@pytest.mark.parametrize("train", ["attention", "values", "lora", "all"])
def test_every_way_of_learning_helps(pair, tmp_path, train):
    folder, student, teacher = pair
    config = HealConfig(train=train, rate=0.03, local_rate=0.03, **QUICK)
    found = heal(student, teacher, tmp_path / "healed", texts=[str(folder / "text.txt")], config=config)
    assert found["after"] < 0.95 * found["before"]
    assert (tmp_path / "healed" / CURVE).is_file()
    assert not (tmp_path / "healed.healing").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "healed")


def test_single_layers_learn_the_same_in_half_precision(pair, tmp_path):
    folder, student, teacher = pair
    after = []
    for precision in ("fp32", "bf16"):
        config = HealConfig(**{**QUICK, "stage": "local", "precision": precision})
        told = heal(student, teacher, tmp_path / precision, texts=[str(folder / "text.txt")], config=config)
        assert told["after"] < 0.9 * told["before"]
        after.append(told["after"])
    assert after[1] == pytest.approx(after[0], rel=0.05)


def test_single_layers_read_no_more_than_was_asked_for(pair, tmp_path, monkeypatch):
    folder, student, teacher = pair
    read = []
    monkeypatch.setattr(local, "_one_by_one", lambda _, __, ___, batches, *rest: read.extend(batches))
    config = HealConfig(**{**QUICK, "tokens": 160, "stage": "local"})
    heal(student, teacher, tmp_path / "out", texts=[str(folder / "text.txt")], config=config)
    assert sum(batch["input_ids"].numel() for batch in read) == config.tokens


def test_what_is_near_its_teacher_learns_more_slowly(pair, tmp_path):
    folder, student, teacher = pair
    assert HealConfig().speed(0.1) == pytest.approx(HealConfig().speed(0.4) / 2)
    assert HealConfig().speed(9.0) == HealConfig().speed(0.4) and HealConfig(rate=0.01).speed(0.1) == 0.01
    heal(student, teacher, tmp_path / "healed", texts=[str(folder / "text.txt")], config=HealConfig(**QUICK))
    lines = [json.loads(line) for line in (tmp_path / "healed" / CURVE).read_text().splitlines()]
    distance = min(line["scores"]["kl"] for line in lines if line["stage"] != "global" and "scores" in line)
    assert max(line["rate"] for line in lines if "rate" in line) == pytest.approx(
        HealConfig().speed(distance), rel=0.05
    )


def heal_command(student, teacher, text, output, *options):
    quick = ["--tokens", "960", "--context", "16", "--precision", "fp32", "--evaluations", "5"]
    return ["heal", student, "--teacher", teacher, "--text", text, "-o", output, *quick, *options]


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_two_processes_do_what_one_does_with_a_double_batch(pair, tmp_path):
    folder, student, teacher = pair
    text = folder / "text.txt"
    for name, batch, processes in (("one", "4", 1), ("two", "2", 2)):
        command = heal_command(student, teacher, text, tmp_path / name, "--batch", batch, "--stage", "global")
        for done in together(processes, lambda env, command=command: start(*command, env=env)):
            assert done.returncode == 0, done.stderr
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    moved = {name: tensor for name, tensor in weights(folder / "student").items() if not torch.equal(tensor, one[name])}
    assert moved
    for name in moved:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / CURVE).read_text().splitlines()]
        for name in ("one", "two")
    ]
    for a, b in zip(*losses, strict=True):
        assert a is None or abs(a - b) < 1e-3


SPLIT = """
import os
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
import headwise.training.work as w

def prepare(self, model, optimizer):  # what Accelerate does under FSDP2, which it offers for accelerators only
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    split = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, groups):
        group["params"] = [split[name] for name in own]
    return model, optimizer

save = w.Work.save

def die(self, stage, step, tensors):
    save(self, stage, step, tensors)
    if step == int(os.environ["DIES_AT"]):
        os._exit(9)

Accelerator.prepare, w.Work.save = prepare, die
"""


def test_a_model_split_over_processes_heals_as_a_whole_one_and_after_a_kill(pair, tmp_path):
    folder, student, teacher = pair
    options = ("--batch", "2", "--stage", "global")
    whole = heal_command(student, teacher, folder / "text.txt", tmp_path / "whole", *options)
    for done in together(2, lambda env: start(*whole, env=env)):
        assert done.returncode == 0, done.stderr
    split = heal_command(student, teacher, folder / "text.txt", tmp_path / "split", *options)
    for dies_at in ("6", "0"):
        assert not (tmp_path / "split").exists()
        asked = {"DIES_AT": dies_at}
        for done in together(2, lambda env, asked=asked: start(*split, first=SPLIT, env={**env, **asked})):
            assert (done.returncode == 0) == (dies_at == "0"), done.stderr
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert any(not torch.equal(tensor, one[name]) for name, tensor in weights(folder / "student").items())
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def whole(pair):
    """A healing that nothing interrupted."""
    folder, student, teacher = pair
    command = heal_command(student, teacher, folder / "text.txt", folder / "whole", "--stage", "both")
    assert headwise(*command).returncode == 0
    return weights(folder / "whole")


@pytest.mark.parametrize(("stage", "step"), [("local", 1), ("global", 24)])
def test_a_killed_healing_continues_and_ends_in_the_same_weights(pair, whole, tmp_path, stage, step):
    folder, student, teacher = pair
    killed = heal_command(student, teacher, folder / "text.txt", tmp_path / "killed", "--stage", "both")
    die = (
        "import os, signal, headwise.training.work as w, headwise.steps.heal.local as l\n"
        "l.SECONDS_BETWEEN = 0\n"
        "save = w.Work.save\n"
        "def die(self, stage, step, tensors):\n"
        "    save(self, stage, step, tensors)\n"
        f"    if stage == {stage!r} and step == {step}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "w.Work.save = die\n"
    )
    assert headwise(*killed, first=die).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    done = headwise(*killed)
    assert done.returncode == 0, done.stderr
    again = weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_best(pair, tmp_path, monkeypatch):
    folder, student, teacher = pair
    loss = Teacher.loss
    monkeypatch.setattr(
        Teacher,
        "loss",
        lambda self, model, inputs, rows, first_round: (
            loss(self, model, inputs, rows, first_round) * (float("nan") if next(count) == 20 else 1)
        ),
    )
    count = itertools.count()
    with pytest.raises(Failed, match=r"not a number at step 21\. The best weights so far \(global 12\) stay in"):
        heal(
            student,
            teacher,
            tmp_path / "out",
            texts=[str(folder / "text.txt")],
            config=HealConfig(stage="global", **QUICK),
        )
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.healing").glob("best-*.safetensors"))


def test_a_layer_whose_error_is_not_a_number_stops_and_is_named(pair, tmp_path):
    folder, student, teacher = pair
    config = HealConfig(stage="local", local_rate=1e30, **QUICK)
    for _ in range(2):  # nothing of it is kept that would spoil a rerun
        with pytest.raises(Failed, match=r"error of layer 0 is not a number\. The weights of the start stay in"):
            heal(student, teacher, tmp_path / "out", texts=[str(folder / "text.txt")], config=config)
    assert not (tmp_path / "out").exists()


def test_what_is_saved_does_not_hang_on_the_model_that_was_trained(pair, tmp_path, monkeypatch):
    """Training may leave parts of it in other processes."""
    folder, student, teacher = pair
    text, config = [str(folder / "text.txt")], HealConfig(stage="global", rate=0.01, **QUICK)
    heal(student, teacher, tmp_path / "whole", texts=text, config=config)

    def spoil(accelerator, model, *rest):
        fit(accelerator, model, *rest)
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)

    monkeypatch.setattr("headwise.steps.heal.healer.fit", spoil)
    heal(student, teacher, tmp_path / "again", texts=text, config=config)
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_weights_without_gradient_do_not_stop_a_rerun(tmp_path, monkeypatch):
    student, teacher = prepared(tmp_path, "bert", lambda name: BertModel(tiny(name).config))
    text, config = [str(tmp_path / "text.txt")], HealConfig(stage="global", train="all", **QUICK)
    heal(student, teacher, tmp_path / "whole", texts=text, config=config)
    save = Work.save

    def die(self, stage, step, tensors):
        save(self, stage, step, tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Work, "save", die)
        heal(student, teacher, tmp_path / "again", texts=text, config=config)
    heal(student, teacher, tmp_path / "again", texts=text, config=config)
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert any("pooler" in name for name in whole)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("train", ["attention", "lora"])
def test_where_attention_was_only_removed_the_rest_of_it_learns(tmp_path, train):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    shape = shape_of(model)
    plan = Plan.make(shape, (LayerPlan(0, 0, 0, 0), *map(LayerPlan.full, shape.layers[1:])))
    plan.save(tmp_path / "plan.json")
    compress(str(tmp_path / "model"), tmp_path / "plan.json", tmp_path / "student")
    config = HealConfig(train=train, **QUICK)
    found = heal(
        str(tmp_path / "student"),
        str(tmp_path / "model"),
        tmp_path / "out",
        texts=[str(tmp_path / "text.txt")],
        config=config,
    )
    assert found["after"] < found["before"]


def test_joined_blocks_learn_what_all_of_theirs_added(tmp_path):
    _, teacher = prepared(tmp_path)
    shape = shape_of(open_model(teacher))
    Plan.make(shape, ((), (Flatten(1),), ())).save(tmp_path / "plan.json")
    compress(teacher, tmp_path / "plan.json", tmp_path / "joined")
    found = heal(
        str(tmp_path / "joined"),
        teacher,
        tmp_path / "out",
        texts=[str(tmp_path / "text.txt")],
        config=HealConfig(**{**QUICK, "stage": "local"}),
    )
    assert found["after"] < found["before"]
    logged = [json.loads(line) for line in (tmp_path / "out" / CURVE).read_text().splitlines()]
    learnt = [line for line in logged if line.get("stage") == "local" and "layer" in line]
    assert [(line["layer"], line["part"]) for line in learnt] == [(1, "attention"), (1, "mlp")]
    assert all(line["error_after"] < line["error_before"] for line in learnt)


def test_an_encoder_decoder_does_not_pretend_to_learn_layer_by_layer(tmp_path):
    student, teacher = prepared(tmp_path, "whisper")
    with pytest.raises(InputError, match="cannot learn one by one: take `stage` global"):
        heal(student, teacher, tmp_path / "out", config=HealConfig(stage="local"))


def test_a_rate_of_its_own_is_another_run_and_no_distance_needs_no_rate():
    assert HealConfig().facts() != HealConfig(rate=HealConfig().speed(1.0)).facts()
    assert HealConfig().speed(-1e-9) == 0.0


def test_a_rate_far_too_high_leaves_the_start(pair, tmp_path):
    folder, student, teacher = pair
    found = heal(
        student,
        teacher,
        tmp_path / "out",
        texts=[str(folder / "text.txt")],
        config=HealConfig(rate=30.0, local_rate=30.0, **QUICK),
    )
    assert found["best"] == "start 0"
    assert found["after"] == found["before"]
    ids = torch.arange(20)[None]
    start, end = (open_model(str(place))(ids).logits for place in (student, tmp_path / "out"))
    torch.testing.assert_close(start, end, rtol=1e-4, atol=1e-4)


def test_a_text_read_twice_asks_the_teacher_once(pair, tmp_path, monkeypatch):
    _, student, teacher = pair
    asked, write = [], Memory.write
    monkeypatch.setattr(
        Memory, "write", lambda self, rows, *rest: (asked.extend(rows.tolist()), write(self, rows, *rest))
    )
    (tmp_path / "short.txt").write_text(TEXT[:2000])
    config = HealConfig(stage="global", **QUICK)
    found = heal(student, teacher, tmp_path / "out", texts=[str(tmp_path / "short.txt")], config=config)
    assert 0 <= len(asked) - len(set(asked)) < config.batch  # the round may end within a batch
    assert 16 * len(asked) < config.tokens
    assert found["after"] < found["before"]


def test_encoders_and_image_models_heal_by_their_outputs(tmp_path):
    (tmp_path / "text").mkdir()
    student, teacher = prepared(tmp_path / "text", "bert")
    found = heal(
        student, teacher, tmp_path / "bert", texts=[str(tmp_path / "text" / "text.txt")], config=HealConfig(**QUICK)
    )
    assert found["after"] < 0.9 * found["before"]
    (tmp_path / "vit").mkdir()
    student, teacher = prepared(tmp_path / "vit", "vit")
    torch.manual_seed(0)
    np.savez(tmp_path / "pictures.npz", pixel_values=torch.randn(64, 3, 12, 12).numpy())
    config = HealConfig(tokens=3000, held_out=100, batch=4, local_tokens=300, precision="fp32")
    found = heal(student, teacher, tmp_path / "healed", inputs=tmp_path / "pictures.npz", config=config)
    assert found["after"] < 0.9 * found["before"]
    with pytest.raises(InputError, match="predicts no next token"):
        heal(student, teacher, tmp_path / "out", inputs=tmp_path / "pictures.npz", config=HealConfig(next_token=1.0))


def test_wrong_pairs_and_numbers_get_a_sentence(pair, tmp_path):
    folder, student, teacher = pair
    text = [str(folder / "text.txt")]
    with pytest.raises(InputError, match=r"no plan\.json"):
        heal(teacher, teacher, tmp_path / "out", texts=text)
    with pytest.raises(InputError, match="no file or folder"):
        heal(student, "./nowhere/at/all", tmp_path / "out", texts=text)
    with pytest.raises(InputError, match="layers"):
        other = tiny("llama", num_hidden_layers=2)
        other.save_pretrained(tmp_path / "other")
        save_tokenizer(tmp_path / "other")
        heal(student, str(tmp_path / "other"), tmp_path / "out", texts=text)
    shutil.copytree(teacher, tmp_path / "renamed")
    words = json.loads((tmp_path / "renamed" / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(InputError, match="different tokenizers"):
        heal(student, str(tmp_path / "renamed"), tmp_path / "out", texts=text)
    with pytest.raises(InputError, match="single window"):
        (tmp_path / "short.txt").write_text("the quick brown fox")
        heal(student, teacher, tmp_path / "out", texts=[str(tmp_path / "short.txt")], config=HealConfig(context=16))
    for wrong in ({"tokens": 0}, {"rate": 0.0}, {"temperature": -1.0}):
        with pytest.raises(InputError, match="must be"):
            HealConfig(**wrong)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_gets_a_sentence_and_leaves_no_output(pair, tmp_path):
    folder, student, teacher = pair
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))"
    done = headwise(*heal_command(student, teacher, folder / "text.txt", tmp_path / "out"), first=full)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "best-" in done.stderr
    assert not (tmp_path / "out").exists()


def test_lean_memory_changes_no_weight_and_further_terms_of_the_loss_count(pair, tmp_path):
    folder, student, teacher = pair
    text, ends = [str(folder / "text.txt")], {}
    for name, options in {"plain": {}, "lean": {"lean": True}, "more": {"hidden": 1.0, "next_token": 0.5}}.items():
        config = HealConfig(stage="global", rate=0.01, **options, **QUICK)
        assert heal(student, teacher, tmp_path / name, texts=text, config=config)["best"] != "start 0"
        ends[name] = weights(tmp_path / name)
    for name, tensor in ends["plain"].items():
        torch.testing.assert_close(ends["lean"][name], tensor, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(ends["more"][name], tensor) for name, tensor in ends["plain"].items())


def test_a_tracker_of_accelerate_is_told_losses_and_scores(pair, tmp_path):
    class Kept(GeneralTracker):
        name, requires_logging_directory = "kept", False

        def __init__(self):
            super().__init__()
            self.started, self.lines = {}, []

        tracker = property(lambda self: self.lines)

        def store_init_configuration(self, values):
            self.started = values

        def log(self, values, step, **_):
            self.lines.append((step, values))

    kept = Kept()
    folder, student, teacher = pair
    heal(
        student, teacher, tmp_path / "healed", texts=[str(folder / "text.txt")], config=HealConfig(**QUICK), track=kept
    )
    assert kept.started["tokens"] == QUICK["tokens"]
    losses = [values["loss"] for _, values in kept.lines if "loss" in values]
    assert len(losses) == QUICK["tokens"] // (QUICK["batch"] * QUICK["context"])
    assert any("held_out_kl" in values for _, values in kept.lines)


def test_examples_of_different_lengths_are_padded_and_padding_does_not_count(pair, tmp_path):
    """Lines are kept apart; a healing of them is that of the same lines at one length, wherever the padding stands."""
    _, student, teacher = pair
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXT[start : start + 20 + start % 7] for start in range(0, 900, 30)))
    model = open_model(student)
    config = HealConfig(**QUICK | {"context": 24})
    windows = read_windows(model, student, [str(lines)], None, config, ReadConfig("lines"))
    mask = windows.rows["attention_mask"]
    assert set(mask.sum(1).tolist()) > {21, 24} and windows.rows["input_ids"].shape[1] == 24
    inputs = {name: tensor[:6] for name, tensor in windows.rows.items()}
    guide = Teacher(open_model(teacher), config, False, None)
    padded = guide.distance(model, inputs)
    total, counted = 0.0, 0
    for row in range(6):
        size = int(inputs["attention_mask"][row].sum())
        total += size * guide.distance(model, {"input_ids": inputs["input_ids"][row : row + 1, :size]}).item()
        counted += size
    assert padded.item() == pytest.approx(total / counted, rel=1e-4)
    found = heal(student, teacher, tmp_path / "healed", texts=[str(lines)], reading=ReadConfig("lines"), config=config)
    assert found["after"] < found["before"]


def test_speech_without_transcripts_heals_whatever_the_model_says_to_it(tmp_path):
    """A .npz that inspect and evaluate take: the model's own words have different lengths."""
    student, teacher = prepared(tmp_path, "whisper")
    sound = np.random.default_rng(0).random((8, 8, 40), dtype=np.float32)
    np.savez(tmp_path / "sound.npz", input_features=sound)
    config = HealConfig(**QUICK | {"tokens": 400, "stage": "global", "batch": 2})
    found = heal(student, teacher, tmp_path / "healed", inputs=tmp_path / "sound.npz", config=config)
    assert found["after"] <= found["before"]


@pytest.mark.parametrize(
    ("train", "dtype"), [("attention", torch.float32), ("lora", torch.float32), ("all", torch.bfloat16)]
)
def test_in_memory_it_is_the_same_to_the_last_bit_and_both_models_stay_as_they_were(tmp_path, train, dtype):
    student, teacher = prepared(tmp_path, build=lambda name: tiny(name).to(dtype))
    config = HealConfig(train=train, rate=0.03, **QUICK)
    report = heal(student, teacher, tmp_path / "folder", texts=[str(tmp_path / "text.txt")], config=config)
    small, model = open_model(student).train(), open_model(teacher)
    model.lm_head.requires_grad_(False)
    before = [{name: t.clone() for name, t in each.state_dict().items()} for each in (small, model)]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    healed = heal_model(small, teacher=model, tokenizer=open_tokenizer(student), text=TEXT, config=config)
    assert torch.equal(torch.rand(1), expected)
    save(healed, tmp_path / "memory")
    one, two = weights(tmp_path / "folder"), weights(tmp_path / "memory")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert healed.dtype == small.dtype == model.dtype == dtype and healed.training and not model.training
    for each, old in zip((small, model), before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in each.state_dict().items())
    assert not model.lm_head.weight.requires_grad and model.model.embed_tokens.weight.requires_grad
    assert plan_of(healed) == plan_of(small)
    card = (tmp_path / "memory" / "README.md").read_text()
    assert f"{report['before']:.4f} before, {report['after']:.4f} after" in card
    assert [json.loads(line).get("scores") for line in (tmp_path / "memory" / CURVE).read_text().splitlines()] == [
        json.loads(line).get("scores") for line in (tmp_path / "folder" / CURVE).read_text().splitlines()
    ]


def test_a_list_of_examples_and_the_tokenizer_beside_the_model_do_too(pair):
    _, student, teacher = pair
    config = HealConfig(rate=0.03, **{**QUICK, "tokens": 320, "stage": "global"})
    healed = heal_model(
        open_model(student), teacher=open_model(teacher), text=TEXT.split(" jumps ")[:90], config=config
    )
    assert not torch.equal(healed.model.layers[0].self_attn.q_proj.weight, weights_of(student, "0.self_attn.q_proj"))
    assert torch.equal(healed.model.layers[2].mlp.up_proj.weight, weights_of(student, "2.mlp.up_proj"))


def weights_of(folder, name):
    return open_model(str(folder)).state_dict()[f"model.layers.{name}.weight"]


def test_what_cannot_be_healed_in_memory_says_why(pair):
    _, student, teacher = pair
    small, model = open_model(student), open_model(teacher)
    with pytest.raises(InputError, match="was not made by headwise"):
        heal_model(model, teacher=model, text=TEXT)
    with pytest.raises(InputError, match="`student` was not cut from `teacher`"):
        heal_model(small, teacher=tiny("llama", seed=3), text=TEXT)
    origin = remember(small, Origin(plan_of(small)))
    with pytest.raises(InputError, match="give it as `tokenizer`"):
        heal_model(origin, teacher=model, text=TEXT)
