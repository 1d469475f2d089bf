"""The whole line in one folder: what comes out, and what a second run leaves alone."""

import json
import pkgutil
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headwise import cost
from headwise.cli import app
from headwise.files.errors import InputError
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from tests.calls import run
from tests.commands import headwise, start
from tests.tiny import tiny
from tests.tokens import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and runs away from here " * 40
FILES = ("profile.json", "profile.safetensors", "report.html", "plan.json", "model/model.safetensors", "scores.json")


@pytest.fixture
def place(tmp_path):
    tiny("llama", head_dim=16).save_pretrained(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def walk(place, share=0.75, **changes):
    texts = [str(place / "text.txt")]
    options = {
        "texts": texts,
        "eval_texts": texts,
        "tokens": 96,
        "eval_tokens": 128,
        "lengths": (16, 32),
        "speed": False,
    }
    return run(str(place / "tiny"), place / "out", Budget("keep_kv", share), **{**options, **changes})


def written(place):
    return {name: (place / "out" / name).stat().st_mtime_ns for name in FILES}


def test_everything_is_there_and_a_second_run_changes_nothing(place):
    scores = walk(place)[2]
    before = written(place)
    dense, student = scores.models
    for scored, folder in ((dense, "tiny"), (student, "out/model")):
        assert scored.cache_bytes_per_token == cost(place / folder, cache_dtype="fp32").kv_bytes_per_token
    assert AutoModelForCausalLM.from_pretrained(place / "out" / "model") is not None
    assert "## Scores" in (place / "out" / "model" / "README.md").read_text()
    page = (place / "out" / "report.html").read_text()
    assert "Before and after" in page
    assert "KL from the baseline" in page
    walk(place)
    assert written(place) == before


def test_only_what_a_change_touches_is_done_again(place):
    walk(place)
    before = written(place)
    walk(place, share=0.5)
    after = written(place)
    assert {name for name in FILES if after[name] != before[name]} == set(FILES) - {
        "profile.json",
        "profile.safetensors",
    }
    before = after
    walk(place, share=0.5, eval_tokens=256)
    after = written(place)
    assert {name for name in FILES if after[name] != before[name]} == {"scores.json", "report.html"}


def test_a_model_folder_of_somebody_else_is_kept(place):
    (place / "out" / "model").mkdir(parents=True)
    (place / "out" / "model" / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        walk(place)
    assert (place / "out" / "model" / "precious.txt").read_text() == "mine"


def test_a_killed_run_goes_on(place):
    command = ["run", "tiny", "--text", "text.txt", "--eval-text", "text.txt", "--tokens", "96"]
    command += ["--eval-tokens", "512", "--no-speed", "-o", "out", "--keep-kv", "0.75"]
    process = start(*command, cwd=place)
    while not (place / "out" / "plan.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = (place / "out" / "profile.json").stat().st_mtime_ns
    done = headwise(*command, cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "out" / "profile.json").stat().st_mtime_ns == before
    assert "perplexity" in done.stdout


@pytest.mark.parametrize("step", ["headwise.pipelines.run.compress", "headwise.steps.heal.heal"])
def test_a_kill_right_after_a_model_was_written_is_no_dead_end(place, monkeypatch, step):
    make = pkgutil.resolve_name(step)

    def die(*args, **options):
        make(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(step, die)
    with pytest.raises(KeyboardInterrupt):
        walk(place, healing=HealConfig(tokens=256))
    monkeypatch.undo()
    _, _, scores = walk(place, healing=HealConfig(tokens=256))
    assert len(scores.models) == 3


def test_the_command_prints_json_and_plans_from_a_model(place, monkeypatch):
    monkeypatch.chdir(place)
    options = ["--text", "text.txt", "--keep-kv", "0.75"]
    result = CliRunner().invoke(
        app, ["run", "tiny", *options, "--tokens", "96", "--eval-tokens", "512", "--no-speed", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["models"]) == 2
    result = CliRunner().invoke(app, ["plan", "tiny", *options, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["headwise"] == "plan"
    assert Path("headwise-tiny-statistics/profile.json").is_file()
    result = CliRunner().invoke(
        app, ["plan", "tiny", "--text", "text.txt", "--max-ppl-increase", "50%", "--multiple-of", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["predicted"]["measured"] <= 0.406


def test_healing_is_part_of_the_line_and_is_not_done_twice(place):
    _, _, scores = walk(place, 0.5, healing=HealConfig(tokens=600))
    assert [Path(model.source).name for model in scores.models] == ["tiny", "model", "healed"]
    healed = place / "out" / "healed"
    before = (healed / "model.safetensors").stat().st_mtime_ns
    page = (place / "out" / "report.html").read_text()
    assert "Healing" in page and "<polyline" in page
    assert "Healed by distillation from tiny" in (healed / "README.md").read_text()
    assert walk(place, 0.5, healing=HealConfig(tokens=600))[2] == scores
    assert (healed / "model.safetensors").stat().st_mtime_ns == before
    walk(place, 0.5, healing=HealConfig(tokens=1200))
    assert (healed / "model.safetensors").stat().st_mtime_ns > before
    assert walk(place, 0.5)[2].models[-1].source.endswith("model")
