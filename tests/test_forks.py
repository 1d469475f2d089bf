"""Forked processes are as good as fresh ones where tests rely on it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.commands import READ_AT_START, finished, headwise, python, start, together


def test_a_command_has_its_own_arguments_folder_environment_and_input(tmp_path, monkeypatch):
    monkeypatch.setenv("ONLY_HERE", "1")
    tell = "import os, sys; print(sys.argv[1:], os.getcwd(), 'ONLY_HERE' in os.environ, os.environ.get('THERE'))"
    read = "print(sys.stdin.read(), file=sys.stderr)"
    done = headwise("--version", first=f"{tell}; {read}", cwd=tmp_path, env={"THERE": "2"}, stdin="given " * 20_000)
    assert (done.returncode, done.stdout) == (0, f"['--version'] {tmp_path} False 2\n0.1.0\n")
    assert done.stderr == "given " * 20_000 + "\n"
    assert "ONLY_HERE" in os.environ


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), 1 / 0)).start()", 0, "by zero\n"),
    ],
)
def test_processes_end_as_those_of_python_do(code, status, error):
    done = finished(python(code))
    assert done.returncode == status and done.stderr.endswith(error), done.stderr
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert fresh.returncode == status and fresh.stderr.endswith(error), fresh.stderr


def test_a_kill_hits_one_process_and_a_command_that_hangs_is_killed():
    wait = "import time; print('here', flush=True); time.sleep(600)"
    first, second = start("--version", first=wait), start("--version", first=wait)
    assert [process.stdout.readline() for process in (first, second)] == ["here\n"] * 2
    first.kill()
    assert (first.wait(60), second.poll()) == (-signal.SIGKILL, None)
    first.kill()  # as of subprocess: nothing happens
    with pytest.raises(subprocess.TimeoutExpired):
        finished(second, timeout=0.01)
    assert second.returncode == -signal.SIGKILL


def test_what_libraries_read_when_they_are_imported_needs_a_fresh_process():
    assert type(start("--version", env={"HOME": "/"})).__name__ == "Process"
    other = {**os.environ, f"{READ_AT_START[0]}NUM_THREADS": "3"}
    process = start("--version", env=other)
    assert isinstance(process, subprocess.Popen) and finished(process).stdout == "0.1.0\n"


def test_the_process_for_saved_models_has_never_seen_headwise():
    code = "import sys; assert 'torch' in sys.modules; print([name for name in sys.modules if 'headwise' in name])"
    assert finished(python(code)).stdout == "[]\n"


def test_of_processes_that_work_together_all_end_when_one_fails():
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(600)"
    assert [done.returncode for done in together(2, lambda env: python(code, env=env))] == [3, -signal.SIGKILL]
