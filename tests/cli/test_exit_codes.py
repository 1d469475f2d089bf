"""Exit codes: 2 for a wrong call or wrong input, 1 where the work failed here, the same for every command."""

import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.child import run_command
from tests.fuzz.shared import built
from tests.fuzz.world import HEAL, MEASURE, RUN, TRAIN

__all__ = ["built"]
NOBODY = 65534
WRITING = {
    "inspect": ("inspect", "llama", *MEASURE, "-o", "OUT"),
    "plan": ("plan", "profile-llama", "--keep-kv", "0.5", "--multiple-of", "2", "-o", "OUT"),
    "plan within": ("plan", "profile-llama", "--max-loss-increase", "0.5", "--text", "other.txt", "-o", "OUT"),
    "compress": ("compress", "llama", "--plan", "plan.json", "--profile", "profile-llama", "-o", "OUT"),
    "evaluate": ("evaluate", "llama", "--text", "text.txt", "--tokens", "64", "--context", "16", "-o", "OUT"),
    "heal": ("heal", "reduced", *HEAL, "-o", "OUT"),
    "run": ("run", "llama", *RUN, "-o", "OUT"),
    "design": ("design", "--params", "2M", "-o", "OUT"),
    "design page": ("design", "--params", "2M", "--page", "OUT"),
    "train": ("train", "--plan", "usual.json", "--data", "text.txt", *TRAIN, "-o", "OUT"),
    "compare": ("compare", "usual.json", "other.json", "--data", "text.txt", *TRAIN, "-o", "OUT"),
    "papers run": ("papers", "run", "depth/parameters", "-o", "OUT"),
    "papers report": ("papers", "report", "-o", "OUT"),
}


@pytest.fixture(scope="module")
def room(built):
    """A copy of all artefacts that anybody can read, and in it a folder that only root could write to."""
    folder = Path(tempfile.mkdtemp(prefix="headwise-"))
    shutil.copytree(built, folder, dirs_exist_ok=True)
    (folder / "locked").mkdir()
    (folder / "file").write_text("x")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "locked").chmod(0o555)
    yield folder
    shutil.rmtree(folder)


def as_nobody():
    """Become a user who may not write where root may."""
    if not os.getuid():
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def run(room, name, output):
    (room / ".said").mkdir(exist_ok=True)
    (room / ".said").chmod(0o777)
    return run_command([output if part == "OUT" else part for part in WRITING[name]], room, patches=[as_nobody])


@pytest.mark.parametrize("output", ["locked/out", "locked/deep/out"])
@pytest.mark.parametrize("name", WRITING)
def test_a_folder_that_cannot_be_written_to_gives_1(room, name, output):
    ended = run(room, name, output)
    assert ended.code == 1, ended
    assert ended.stderr.startswith("headwise: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "Permission denied" in ended.stderr and "locked" in ended.stderr
    assert not list((room / "locked").iterdir())


@pytest.mark.parametrize("name", WRITING)
def test_an_output_below_a_file_gives_2(room, name):
    ended = run(room, name, "file/out")
    assert ended.code == 2, ended
    assert ended.stderr.startswith("headwise: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert (room / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["plan", "plan within", "evaluate", "design", "design page"])
def test_a_folder_in_place_of_a_file_gives_2(room, name):
    ended = run(room, name, "llama")
    assert ended.code == 2 and "is a folder; give the name of a file" in ended.stderr, ended


def nothing_is_a_number():
    from headwise.steps.heal.teacher import Teacher
    from headwise.steps.train.fitting import Task

    for each in (Teacher, Task):
        each.loss = lambda self, *given, own=each.loss, **options: own(self, *given, **options) * math.nan


@pytest.mark.parametrize("name", ["train", "heal", "compare"])
def test_a_loss_that_is_no_number_gives_1(built, tmp_path, name):
    for part in ("llama", "reduced", "text.txt", "usual.json", "other.json"):
        source = built / part
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / part)
    arguments = [*("out" if part == "OUT" else part for part in WRITING[name])]
    arguments += ["--stage", "global"] if name == "heal" else []
    ended = run_command(arguments, tmp_path, patches=[nothing_is_a_number])
    assert ended.code == 1, ended
    assert "loss is not a number at step 1" in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


def test_arguments_that_are_no_text_give_2(tmp_path):
    ended = run_command(["cost", "mod\udcffel"], tmp_path)
    assert ended.code == 2 and "is not UTF-8 text" in ended.stderr, ended
