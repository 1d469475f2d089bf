"""Every command and every piece of Python in the README runs, in order, on the real model."""

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

import headwise  # noqa: F401 - opens its models without trust_remote_code
from headwise.steps.demo import demo_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", README, flags=re.DOTALL)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def test_demo_does_the_whole_line(tmp_path):
    demo = subprocess.run(
        ["headwise", "demo"], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False
    )
    assert demo.returncode == 0, demo.stderr
    table = re.search(r"```\n(layers .*?)```", README, flags=re.DOTALL)
    assert table and demo.stdout.startswith(table[1])
    assert "the capital of Germany is Berlin" in demo.stdout
    assert "(75.0%)" in demo.stdout
    assert "KL from the first, nats" in demo.stdout
    assert "Before and after" in (tmp_path / "headwise-demo" / "report.html").read_text(encoding="utf-8")
    for name in ("model", "healed"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "headwise-demo" / name) is not None


def test_everything_in_the_readme_runs(tmp_path):
    demo_model()  # where the README expects it
    assert len(BLOCKS) >= 4
    for language, code in BLOCKS:
        if language == "python":
            commands = [[sys.executable, "-c", code]]
        else:
            lines = [line for line in code.splitlines() if line.startswith("headwise")]
            commands = [["bash", "-c", line] for line in lines]
        for command in commands:
            process = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, check=False
            )
            assert process.returncode == 0, f"{code}\n{process.stderr}"
    assert (tmp_path / "smollm2-student" / "model.safetensors").is_file()


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
