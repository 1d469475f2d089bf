"""Damaged files: every command ends by itself, with one sentence and a right exit code, and harms nothing.

`make fuzz N=1000 SEED=0` runs more of them, `python -m tests.fuzz --seed S --case K` one alone.
"""

import json
from random import Random

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.fuzz.cases import COMMANDS, run_case
from tests.fuzz.child import run_command
from tests.fuzz.damage import change_json, damage
from tests.fuzz.shared import built

__all__ = ["built"]
SEED, PARTS, CASES = 0, 8, 200


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files_get_a_sentence_and_no_command_hangs(built, tmp_path, part):
    for number in range(part * CASES // PARTS, (part + 1) * CASES // PARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdict = run_case(built, SEED, number, folder)
        again = f"python -m tests.fuzz --seed {SEED} --case {number}"
        assert not verdict.wrong, f"{verdict.said}: {verdict.wrong} ({again})\n{verdict.ended.stderr}"


def test_undamaged_files_are_fine(built, tmp_path):
    """Else a sentence would say nothing about the damage."""
    from tests.fuzz.cases import prepare

    for number, command in enumerate(COMMANDS):
        if command.arguments[0] not in ("cost", "plan", "papers", "evaluate"):  # the others built these artefacts
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        prepare(built, command, folder)
        ended = run_command(command.arguments, folder)
        assert (ended.code, ended.stderr) == (0, ""), f"{command}\n{ended.stderr}"


def test_a_command_that_hangs_fails_or_prints_a_traceback_is_noticed(tmp_path):
    """The driver itself must be able to fail."""
    import time

    from tests.fuzz.cases import judge

    def hang():
        time.sleep(60)

    def fail():
        raise KeyError("nobody expected this")

    assert judge(run_command(["--version"], tmp_path, patches=[hang], seconds=1.0)) == "did not end"
    assert "traceback" in judge(run_command(["--version"], tmp_path, patches=[fail]))
    assert "traceback" in judge(run_command(["--version"], tmp_path, then=fail))
    assert judge(run_command(["--version"], tmp_path)) == ""


def test_every_kind_of_file_is_damaged_and_a_seed_repeats_it(built, tmp_path):
    for name in (
        "plan.json",
        "run/healed/healing.jsonl",
        "profile-llama/profile.safetensors",
        "inputs.npz",
        "text.txt",
    ):
        source = built / name
        found = set()
        for seed in range(60):
            copies = []
            for twice in range(2):
                path = tmp_path / f"{twice}" / f"{seed}{source.suffix}"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(source.read_bytes())
                said = damage(path, Random(seed), built)
                copies.append((said, path.read_bytes() if path.is_file() and not path.is_symlink() else said))
            assert copies[0][0] == copies[1][0]
            if source.suffix != ".npz":  # which holds the time of day
                assert copies[0][1] == copies[1][1]
            found.add(copies[0][1])
        assert len(found) > 15, name


def test_changes_of_json_reach_every_depth():
    content = {"a": [[1.0, 2.0], {"b": [3]}], "c": "x"}
    seen = set()
    for seed in range(300):
        changed = json.loads(json.dumps(content))
        change_json(changed, Random(seed))
        seen.add(json.dumps(changed))
    assert any("NaN" in text for text in seen) and any('"b": []' in text for text in seen)
    assert any('"c"' not in text for text in seen) and len(seen) > 100


def test_the_artefacts_are_of_every_kind(built):
    kinds = {path.suffix for path in built.rglob("*") if path.is_file()}
    assert {".json", ".jsonl", ".safetensors", ".npz", ".png", ".bin", ".txt", ".tsv"} <= kinds
    assert load_file(built / "llama" / "model.safetensors") and np.load(built / "inputs.npz").files
    assert list((built / "healed.healing").glob("*.safetensors")) and not (built / "healed").exists()
    assert list((built / "trained.training").glob("global-*.safetensors")) and not (built / "trained").exists()
    assert (built / "begun" / "unfinished.safetensors").is_file() and not (built / "begun" / "profile.json").exists()
