"""Every command and every piece of Python in the README runs, in order, on the real model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

import headwise  # noqa: F401 - opens its models without trust_remote_code
from headwise.steps.demo import demo_model
from tests import commands as cli
from tests.tiny import SMOLLM2, instead_of_smollm2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", README, flags=re.DOTALL)
(SCRIPT,) = [code for language, code in BLOCKS if language == "python" and "hw.heal(" in code]
TABLE = re.findall(r"```\n(layers .*?)```", README, flags=re.DOTALL)[0]
BIN = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def in_shell(command, **options):
    environment = {**os.environ, "PATH": BIN, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **options)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def check_demo(output, folder):
    assert "(75.0%)" in output
    assert "KL from the baseline, nats" in output
    assert "Before and after" in (folder / "report.html").read_text(encoding="utf-8")
    for name in ("model", "healed"):
        assert AutoModelForCausalLM.from_pretrained(folder / name) is not None


@pytest.mark.slow
def test_demo_does_the_whole_line(tmp_path):
    output = in_shell(["headwise", "demo"], cwd=tmp_path)
    assert output.startswith(TABLE)
    assert "the capital of Germany is Berlin" in output
    check_demo(output, tmp_path / "headwise-demo")


def test_the_cost_it_shows_is_that_of_smollm2(tmp_path):
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert cli.headwise("cost", tmp_path).stdout == TABLE


def at_home(folder):
    rest = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    return {"cwd": folder, "env": {**rest, "HOME": str(folder)}}


def test_demo_does_the_whole_line_with_a_tiny_model(tmp_path):
    """The same command where a tiny model stands in place of SmolLM2."""
    instead_of_smollm2(tmp_path, head_dim=16)
    demo = cli.headwise("demo", **at_home(tmp_path))
    assert demo.returncode == 0, demo.stderr
    check_demo(demo.stdout, tmp_path / "headwise-demo")


def run_blocks(place, run_python, run_line):
    """Everything in the README but its script, in order."""
    assert len(BLOCKS) >= 4
    for language, code in BLOCKS:
        if code == SCRIPT:
            continue
        if language == "python":
            run_python(code)
        for line in code.splitlines() if language == "sh" else ():
            if line.startswith("headwise"):
                run_line(line)
    assert (place / "smollm2-by-hand" / "model.safetensors").is_file()


@pytest.mark.slow
def test_everything_in_the_readme_runs(tmp_path):
    demo_model()  # where the README expects it
    run_blocks(
        tmp_path,
        lambda code: in_shell([sys.executable, "-c", code], cwd=tmp_path),
        lambda line: in_shell(["bash", "-c", line], cwd=tmp_path),
    )


def test_everything_in_the_readme_runs_with_a_tiny_model(tmp_path):
    instead_of_smollm2(tmp_path, **SMOLLM2)

    def succeeds(process):
        done = cli.finished(process)
        assert done.returncode == 0, done.stderr

    run_blocks(
        tmp_path,
        lambda code: succeeds(cli.python(code, **at_home(tmp_path))),
        lambda line: succeeds(cli.start(*shlex.split(line)[1:], **at_home(tmp_path))),
    )


def test_the_script_does_the_whole_line_with_objects_only(tmp_path):
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 15
    instead_of_smollm2(tmp_path, head_dim=16)
    for name, words in (("train", ["fox", "hen", "cow"]), ("test", ["pig", "cat"])):
        sentences = (f"the quick brown {a} jumps over the lazy {b}. " for a in words for b in words)
        (tmp_path / f"{name}.txt").write_text("".join(sentences) * 60)
    code = SCRIPT.replace("tokens=200_000", "tokens=1024, context=64, held_out=128")
    done = cli.finished(cli.python(code, **at_home(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "reduced" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2-reduced") is not None


def test_the_two_commands_are_on_the_first_screen():
    first = README.splitlines()[:15]
    assert any(line.startswith("make demo") for line in first)
    assert any(line.startswith("make test") for line in first)


def test_every_linked_file_is_there():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert document.parent.joinpath(target).exists(), target


def test_every_quantity_is_defined_in_the_docs():
    from headwise.records.profile import QUANTITIES

    text = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    for name, quantity in QUANTITIES.items():
        assert f"| `{name}` | {', '.join(quantity.axes)} | {quantity.text} |" in text, name
