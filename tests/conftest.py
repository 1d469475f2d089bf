import io
import os
import subprocess
from contextlib import redirect_stdout

import pytest
import torch
import transformers
from hypothesis import settings

from headwise.families.known import BY_MODEL_TYPE
from headwise.runtime import reopen
from tests.commands import check_in_a_fork

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start: two workers with two threads each stall

RUN = subprocess.run
settings.register_profile("same examples every time", derandomize=True, deadline=None)
settings.load_profile("same examples every time")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    """Tests run side by side under xdist: one thread each. Tiny models make transformers warn about their sizes."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _checked_in_forks():
    """Saved models are opened again in processes that are forked, not started: as strict, and 20 times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", check_in_a_fork(RUN))
        yield


@pytest.fixture
def families_as_before():
    """What a test registers is forgotten after it."""
    before = dict(BY_MODEL_TYPE)
    yield
    BY_MODEL_TYPE.clear()
    BY_MODEL_TYPE.update(before)


@pytest.fixture
def fresh_check(monkeypatch):
    """Saved models are opened again in fresh processes, as for users: for the tests of exactly that."""
    monkeypatch.setattr(subprocess, "run", RUN)


@pytest.fixture
def reopened_here(monkeypatch, tmp_path):
    """Saved models are opened again in this process: for tests of many models that are not about saving."""
    run = subprocess.run

    def here(command, *args, **kwargs):
        if reopen.__file__ not in command:
            return run(command, *args, **kwargs)
        with redirect_stdout(io.StringIO()) as output:
            reopen.main(*command[command.index(reopen.__file__) + 1 :])
        return subprocess.CompletedProcess(command, 0, output.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
