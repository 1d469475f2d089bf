"""A folder has one writer at a time, and nothing remains of locks and temporary files."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from headwise.files import locks
from headwise.files.locks import locked, locking
from headwise.files.writing import new_folder, write_text
from headwise.records import InputError

HOLD = (
    "import sys, time; from pathlib import Path; from headwise.files.locks import locked\n"
    "with locked(Path(sys.argv[1]), 'heal'):\n"
    "    print('held', flush=True); sys.stdin.readline()\n"
)
LEAVE = (
    "import os, sys; from pathlib import Path; from headwise.files.writing import new_folder, replacing\n"
    "folder = Path(sys.argv[1])\n"
    "with new_folder(folder / 'out') as one, replacing(folder / 'plan.json') as two:\n"
    "    (one / 'half').write_text('x'); two.write_text('x'); os.kill(os.getpid(), 9)\n"
)


@contextmanager
def holder(folder):
    """Another process that has locked ``folder``."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_is_told_who_is_at_work(tmp_path):
    with holder(tmp_path / "new" / "out") as process:
        sentence = rf"out is being written by process {process.pid} \(headwise heal\) since \d\d:\d\d; wait for it or"
        with pytest.raises(InputError, match=sentence), locked(tmp_path / "new" / "out", "compress"):
            pass
        with locked(tmp_path / "other", "compress"):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with locked(tmp_path / "new" / "out", "compress"):  # a killed process holds nothing
            assert (tmp_path / "new" / ".out.lock").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


def test_a_lock_leaves_nothing_behind(tmp_path):
    with locked(tmp_path / "some" / "where" / "out", "compress"):
        assert not (tmp_path / "some" / "where" / "out").exists()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "out", "compress"):
        (tmp_path / "out").mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_step_may_use_another_on_the_same_folder_but_no_other_thread(tmp_path):
    refused = []

    @locking("output")
    def inspect(source, output):
        with locked(output, "again"):
            thread = threading.Thread(target=lambda: refused.append(attempt(output)))
            thread.start()
            thread.join()
        with pytest.raises(InputError, match="being written"):
            attempt_elsewhere(output)
        return source

    def attempt(output):
        try:
            inspect(1, output)
        except InputError as error:
            return str(error)

    def attempt_elsewhere(output):
        done = subprocess.run([sys.executable, "-c", HOLD, str(output)], capture_output=True, text=True, check=False)
        raise InputError(done.stderr.strip().splitlines()[-1])

    assert inspect(7, output=tmp_path / "out") == 7
    assert f"process {os.getpid()} (headwise inspect)" in refused[0]
    assert inspect(7, tmp_path / "out") == 7


def test_of_processes_that_share_a_step_only_the_first_locks(tmp_path, monkeypatch):
    with holder(tmp_path / "out"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path / "out", "heal"):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InputError, match="being written"), locked(tmp_path / "out", "heal"):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_of_the_system_a_note_of_a_living_process_counts(number, tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with holder(tmp_path / "out") as process:
        with pytest.raises(InputError, match=f"process {process.pid}"), locked(tmp_path / "out", "compress"):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path / "out", "compress"):
            pass
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_beside_a_folder_it_is_locked_inside(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with locked(tmp_path / "out", "inspect"):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    with pytest.raises(PermissionError), locked(tmp_path / "new", "compress"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_folder_below_a_file_cannot_be_locked(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is not a folder"), locked(tmp_path / "file" / "out", "compress"):
        pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"), locked(tmp_path / "out", "compress"):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_locks_go_from_hand_to_hand(tmp_path):
    """Many who come and go: never two at once, although each removes the lock file at its end."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from headwise.files.errors import InputError; from headwise.files.locks import locked\n"
        "folder, done, end = Path(sys.argv[1]), 0, time.monotonic() + 20\n"
        "while done < 40 and time.monotonic() < end:\n"
        "    try:\n"
        "        with locked(folder / 'out', 'x'):\n"
        "            (folder / 'alone').mkdir(); (folder / 'alone').rmdir(); done += 1\n"
        "    except InputError:\n"
        "        pass\n"
        "assert done == 40\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert not list(tmp_path.iterdir())


def test_temporary_names_cannot_be_guessed_and_vanish_with_their_process(tmp_path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path)], check=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2, left  # the second run has removed what the first left
    assert all(re.fullmatch(r"\.(out|plan\.json)\.[0-9a-f]{8}-\d+-[0-9a-f]{16}", name) for name in left)
    alive = tmp_path / re.sub(r"-\d+-", f"-{os.getppid()}-", left[0])
    alive.mkdir()
    (tmp_path / ".plan.json.swp").write_text("an editor's")
    write_text(tmp_path / "plan.json", "x")
    with new_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, ".plan.json.swp", "plan.json", "out"}
    assert (tmp_path / "out" / "inner" / "file").stat().st_mode & 0o777 == 0o644


def test_times_of_other_days_and_machines_are_told(tmp_path):
    note = {"pid": 7, "host": "elsewhere", "what": "train", "since": time.time() - 3 * 86400}
    sentence = locks._who(note)
    assert re.fullmatch(r"process 7 on elsewhere \(headwise train\) since \d{4}-\d\d-\d\d \d\d:\d\d; .*", sentence)
    assert locks._who({}) == locks._who({**note, "since": "x"})
