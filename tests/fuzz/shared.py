"""The artefacts of the fuzz driver for tests: built once, whichever process of a test run needs them first."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.fuzz import world
from tests.fuzz.child import preload


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all artefacts, which nobody may change."""
    preload()
    room = tmp_path_factory.getbasetemp()
    room = room.parent if "PYTEST_XDIST_WORKER" in os.environ else room
    with (room / "fuzz.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (room / "fuzz" / "done").exists():
            world.build(room / "fuzz" / "world")
            (room / "fuzz" / "done").touch()
    return room / "fuzz" / "world"
