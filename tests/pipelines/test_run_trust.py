"""A run rests on the contents of what it was given and has made, and goes through for models of every kind."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.files.errors import InputError
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.plan import Plan
from tests.calls import run
from tests.commands import headwise
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 40
OTHER = "never eat soggy waffles under a bridge because trolls like them a lot " * 40
QUICK = {"tokens": 96, "eval_tokens": 128, "lengths": (16, 32), "speed": False}


@pytest.fixture
def place(tmp_path):
    tiny("llama", head_dim=16).save_pretrained(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def walk(place, share=0.75, **changes):
    options = {**QUICK, "texts": [str(place / "text.txt")], "eval_texts": [str(place / "text.txt")], **changes}
    return run(str(place / "tiny"), place / "out", Budget("keep_kv", share), **options)


@pytest.mark.usefixtures("reopened_here")
def test_a_plan_of_somebody_else_is_never_built_from(place):
    walk(place, 0.5)
    half = (place / "out" / "plan.json").read_text()
    other = place / "other"
    other.mkdir()
    (other / "plan.json").write_text(half)
    with pytest.raises(InputError, match=r"plan\.json exists already and was not made by this run: remove it or give"):
        run(str(place / "tiny"), other, Budget("keep_kv", 0.75), **QUICK)
    assert [path.name for path in other.iterdir()] == ["plan.json"]
    assert (other / "plan.json").read_text() == half


@pytest.mark.usefixtures("reopened_here")
def test_an_edited_plan_is_named_and_made_again_once_it_is_gone(place):
    _, plan, _ = walk(place)
    file, weights = place / "out" / "plan.json", place / "out" / "model" / "model.safetensors"
    card, before = (place / "out" / "model" / "README.md").read_text(), weights.read_bytes()
    assert "Its budget: 0.75 of the KV cache." in card
    body = json.loads(file.read_text())
    body["layers"][0]["v_dim"] = 8
    file.write_text(json.dumps(body))
    with pytest.raises(InputError, match=r"plan\.json was changed since this run made it: remove it or give another"):
        walk(place)
    assert weights.read_bytes() == before
    file.unlink()
    assert walk(place)[1] == plan
    assert weights.read_bytes() == before


@pytest.mark.usefixtures("reopened_here")
@pytest.mark.parametrize("name", ["profile.json", "profile.safetensors", "model/model.safetensors", "scores.json"])
def test_whatever_of_a_run_was_changed_is_named(place, name):
    walk(place)
    file = place / "out" / name
    file.write_bytes(file.read_bytes().replace(b"0", b"1"))
    with pytest.raises(InputError, match=f"{name} was changed since this run made it"):
        walk(place)


@pytest.mark.usefixtures("reopened_here")
def test_other_weights_or_words_at_the_same_place_are_another_model(place):
    _, plan, scores = walk(place)
    tiny("llama", seed=1, head_dim=16).save_pretrained(place / "tiny")
    _, other, found = walk(place)
    assert other.fingerprint != plan.fingerprint
    assert found.models[0].loss != scores.models[0].loss
    assert Plan.load(place / "out" / "model" / "plan.json").fingerprint == other.fingerprint


@pytest.mark.usefixtures("reopened_here")
def test_a_text_is_its_content_on_standard_input_too(place, monkeypatch):
    def fed(text, **options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return walk(place, texts=["-"], eval_texts=["-"], **options)[2]

    first = fed(TEXT, healing=HealConfig(tokens=256))
    assert len(first.models) == 3 and fed(TEXT, healing=HealConfig(tokens=256)) == first
    assert fed(OTHER, healing=HealConfig(tokens=256)).models[0].loss != first.models[0].loss
    (place / "text.txt").write_text(OTHER)
    kept = (place / "out" / "scores.json").stat().st_mtime_ns
    walk(place, healing=HealConfig(tokens=256))  # the same text by another name
    assert (place / "out" / "scores.json").stat().st_mtime_ns == kept


def test_standard_input_serves_every_step_of_a_command(place):
    options = ["--keep-kv", "0.75", "--tokens", "96", "--eval-tokens", "512", "--no-speed", "--heal-tokens", "256"]
    done = headwise("run", "tiny", "--text", "-", "--eval-text", "-", *options, stdin=TEXT, cwd=place)
    assert done.returncode == 0, done.stderr
    done = headwise(
        "plan", "tiny", "--text", "-", "--max-ppl-increase", "50%", "--multiple-of", "2", stdin=TEXT, cwd=place
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("reopened_here")
def test_a_page_that_is_gone_is_written_again_with_before_and_after(place):
    walk(place, 0.5, healing=HealConfig(tokens=256))
    page = place / "out" / "report.html"
    before = page.read_text()
    page.unlink()
    walk(place, 0.5, healing=HealConfig(tokens=256))
    assert page.read_text() == before
    assert "Before and after" in before and "<h3>Healing</h3>" in before


@pytest.mark.usefixtures("reopened_here")
def test_two_runs_come_to_the_same_bytes(tmp_path):
    found = []
    tiny("llama", hidden_size=256, head_dim=64).save_pretrained(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    for name in ("one", "two"):
        walk(tmp_path, 0.5, healing=HealConfig(tokens=256))
        (tmp_path / "out").rename(tmp_path / name)
        files = {path.relative_to(tmp_path / name): path for path in (tmp_path / name).rglob("*") if path.is_file()}
        found.append({file: path.read_bytes() for file, path in files.items()})
    assert found[0].keys() == found[1].keys()
    timed = {Path("healed/healing.jsonl"), Path("run.json"), Path("report.html")}  # tokens per second, and their hash
    assert {name for name in found[0] if found[0][name] != found[1][name]} <= timed
    card = (tmp_path / "one" / "healed" / "README.md").read_text()
    assert "trained in bf16" in card or "trained in fp32" in card
    scores = [json.loads(each[Path("scores.json")]) for each in found]
    assert scores[0] == scores[1]


@pytest.mark.usefixtures("reopened_here")
def test_precision_is_what_is_asked_for(place):
    walk(place, healing=HealConfig(tokens=256, precision="bf16"))
    assert "trained in bf16" in (place / "out" / "healed" / "README.md").read_text()


@pytest.mark.usefixtures("reopened_here")
def test_models_without_a_cache_go_through_the_whole_line(tmp_path):
    bert = {"hidden_size": 64, "num_attention_heads": 2}
    tiny("bert", **bert).save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    (tmp_path / "text.txt").write_text(TEXT)
    texts = [str(tmp_path / "text.txt")]
    with pytest.raises(InputError, match="no KV cache; use `keep_attention_params`"):
        run(str(tmp_path / "bert"), tmp_path / "out", Budget("keep_kv", 0.75), texts=texts, **QUICK)
    assert not (tmp_path / "out").exists()
    options = {**QUICK, "texts": texts, "eval_texts": texts, "healing": HealConfig(tokens=256)}
    _, plan, scores = run(str(tmp_path / "bert"), tmp_path / "out", **options)
    assert plan.budget["keep_attention_params"] == 0.75 and plan.predicted["kept"] <= 0.75
    assert len(scores.models) == 3 and scores.models[1].agreement is not None


@pytest.mark.usefixtures("reopened_here")
def test_models_of_pictures_go_through_the_whole_line(tmp_path):
    tiny("vit", hidden_size=64, num_attention_heads=2).save_pretrained(tmp_path / "vit")
    torch.manual_seed(0)
    for name in ("some", "others"):
        np.savez(tmp_path / f"{name}.npz", pixel_values=torch.randn(24, 3, 12, 12).numpy())
    options = {"tokens": 100, "eval_tokens": 128, "speed": False, "healing": HealConfig(tokens=100)}
    pictures = tmp_path / "some.npz"
    _, plan, scores = run(str(tmp_path / "vit"), tmp_path / "out", inputs=pictures, **options)
    assert plan.budget["keep_attention_params"] == 0.75
    assert len(scores.models) == 3 and scores.models[2].agreement is not None
    assert any("also measured on" in note for note in scores.notes)
    found = run(
        str(tmp_path / "vit"), tmp_path / "out", inputs=pictures, eval_inputs=tmp_path / "others.npz", **options
    )
    assert found[2].models[1].agreement != scores.models[1].agreement
    assert not any("also measured on" in note for note in found[2].notes)
    with pytest.raises(InputError, match=r"There is nothing at .*none\.npz to read inputs from"):
        run(str(tmp_path / "vit"), tmp_path / "new", inputs=pictures, eval_inputs=tmp_path / "none.npz", **options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="Give text or inputs, not both"):
        run(str(tmp_path / "vit"), tmp_path / "out", inputs=pictures, texts=["x.txt"])


def test_the_command_takes_inputs_and_needs_no_budget(tmp_path):
    tiny("vit", hidden_size=64, num_attention_heads=2).save_pretrained(tmp_path / "vit")
    np.savez(tmp_path / "some.npz", pixel_values=np.random.default_rng(0).normal(size=(8, 3, 12, 12)))
    options = ["--inputs", "some.npz", "--tokens", "60", "--eval-tokens", "60", "--no-speed", "--precision", "fp32"]
    done = headwise("run", "vit", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of the attention parameters" in done.stdout
    done = headwise("run", "vit", "--inputs", "some.npz", "--keep-kv", "0.5", "-o", "other", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "other").exists()


@pytest.mark.usefixtures("reopened_here")
def test_a_result_of_a_run_is_not_run_on_in_its_own_folder(place):
    walk(place)
    before = (place / "out" / "model" / "model.safetensors").read_bytes()
    for source in ("out", "out/model"):
        with pytest.raises(InputError, match="give another"):
            run(str(place / source), place / "out", Budget("keep_kv", 0.75), **QUICK)
    assert (place / "out" / "model" / "model.safetensors").read_bytes() == before
