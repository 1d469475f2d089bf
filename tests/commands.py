"""The command line for tests: ``headwise`` and what surrounds it in real processes, forked from one that is ready.

    done = headwise("cost", folder, "--json", cwd=here)     # as subprocess.run: returncode, stdout, stderr
    process = start("run", model, "-o", out)                # as subprocess.Popen: pid, poll, wait, communicate, kill

Both take ``stdin`` (text), ``cwd``, ``env`` (all of it, as for subprocess), ``first`` (Python to run before the
command, for example to let it die somewhere) and ``fresh=True`` for an interpreter of its own, which takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from tests.forks import INT

ROOT = Path(__file__).parent.parent
REOPEN = "headwise/runtime/reopen.py"
TIMEOUT = 300.0  # seconds after which a command hangs
AT_START = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
READ_AT_START = ("OMP_", "MKL_", "PYTHON", "HF_", "TRANSFORMERS_", "TORCH_")  # by libraries, when they are imported
COMMAND = "import runpy; runpy.run_module('headwise', run_name='__main__', alter_sys=True)"
SCRIPT = "import runpy, sys; del sys.path[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
PLAIN = (
    "torch",
    "transformers",
    "safetensors.torch",
    "transformers.dynamic_module_utils",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
WITH_HEADWISE = (*PLAIN, "tests.preload", "tests.commands")


@functools.cache
def _ready(modules: tuple[str, ...]) -> str:
    """Start a process with these modules imported, once; where it takes requests."""
    folder = tempfile.TemporaryDirectory(prefix="forks")
    place = f"{folder.name}/socket"
    command = [sys.executable, "-m", "tests.forks", place, *modules]
    server = subprocess.Popen(command, cwd=ROOT, env=AT_START, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin and server.stdout
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"The process that forks for tests ended with {server.wait()}.")
    server.stdout.close()

    def end() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return place


class Process:
    """A process forked from the one at ``place``, as `subprocess.Popen` of ``python -c code`` with text in pipes."""

    def __init__(
        self,
        place: str,
        code: str,
        argv: list[str],
        *,
        stdin: str | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.args, self.returncode, self._lock = argv, None, threading.Lock()
        self._output: dict[Any, str] = {}
        self._readers: list[threading.Thread] = []
        request = {
            "code": code,
            "argv": argv,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        read_in, write_in = os.pipe()
        (read_out, out), (read_err, err) = os.pipe(), os.pipe()
        text = {"encoding": "utf-8", "errors": "backslashreplace"}
        self.stdout, self.stderr = os.fdopen(read_out, **text), os.fdopen(read_err, **text)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(place)
        with tempfile.TemporaryFile() as request_file:
            request_file.write(json.dumps(request).encode())
            request_file.flush()
            socket.send_fds(self._server, [b"."], [read_in, out, err, request_file.fileno()])
        for end in (read_in, out, err):
            os.close(end)
        threading.Thread(target=_write, args=(write_in, stdin or ""), daemon=True).start()
        self.pid = self._receive()

    def _receive(self) -> int:
        answer = self._server.recv(INT, socket.MSG_WAITALL)
        assert len(answer) == INT, "the process that forks for tests is gone"
        return int.from_bytes(answer, "big")

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], timeout)[0]:
            with self._lock:  # two threads may have seen the same end
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._receive())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self._readers:
            for file in (self.stdout, self.stderr):
                self._readers.append(threading.Thread(target=self._read, args=(file,), daemon=True))
                self._readers[-1].start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():  # a process that it started holds the pipe
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.close()
        return self._output[self.stdout], self._output[self.stderr]

    def _read(self, file: TextIO) -> None:
        self._output[file] = file.read()

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        for file in (self.stdout, self.stderr, self._server):
            file.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        self.close()

    __del__ = close


def _write(file: int, text: str) -> None:
    with suppress(BrokenPipeError), os.fdopen(file, "w", encoding="utf-8") as pipe:
        pipe.write(text)


def start(
    *args: object,
    first: str = "",
    stdin: str | None = None,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Process | subprocess.Popen[str]:
    """Start ``headwise`` with these arguments; its outputs come through pipes, as text."""
    words = list(map(str, args))
    if fresh or not _as_it_was_read(os.environ if env is None else env):
        code = f"{first}\nimport sys\nsys.argv[0] = 'headwise'\n{COMMAND}"
        with tempfile.TemporaryFile() as stdin_file:
            stdin_file.write((stdin or "").encode())
            stdin_file.seek(0)
            command = [sys.executable, *(["-c", code] if first else ["-m", "headwise"]), *words]
            pipes: Any = {"stdin": stdin_file, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, cwd=cwd, env=None if env is None else dict(env), **pipes)
    before = (
        "import subprocess\nfrom tests.commands import check_in_a_fork\n"
        f"subprocess.run = check_in_a_fork(subprocess.run, {_ready(PLAIN)!r})"
    )
    return Process(
        _ready(WITH_HEADWISE), f"{before}\n{first}\n{COMMAND}", ["headwise", *words], stdin=stdin, cwd=cwd, env=env
    )


def headwise(*args: object, timeout: float = TIMEOUT, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``headwise`` with these arguments to its end; options are those of `start`."""
    return finished(start(*args, **options), timeout)


def finished(process: Process | subprocess.Popen[str], timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """The exit code and output of a process; one that hangs is killed."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(code: str, *args: object, **options: Any) -> Process:
    """Start Python in a process that knows transformers and has never seen headwise."""
    return Process(_ready(PLAIN), code, ["-c", *map(str, args)], **options)


def together(number: int, begin: Callable[[dict[str, str]], Process]) -> list[subprocess.CompletedProcess[str]]:
    """Run processes that find each other by the environment ``begin`` is given, as torchrun's do.

    Where one fails, the others are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    processes = [
        begin({**os.environ, **place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(number)
    ]
    with ThreadPoolExecutor(number) as readers:
        ends = [readers.submit(finished, process) for process in processes]
        for end in as_completed(ends):
            if end.result().returncode:
                for process in processes:
                    process.kill()
    return [end.result() for end in ends]


def check_in_a_fork(run: Callable[..., Any], place: str | None = None) -> Callable[..., Any]:
    """`subprocess.run` that opens saved models again in forks of a process without headwise, not in fresh processes."""

    def forked(command: Sequence[str], *args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        script = next((word for word in command if str(word).endswith(REOPEN)), None)
        if script is None:
            return run(command, *args, **options)
        words = list(command[command.index(script) :])
        return finished(Process(place or _ready(PLAIN), SCRIPT, words, env=options.get("env")))

    return forked


def _as_it_was_read(env: Mapping[str, str]) -> bool:
    """Whether an environment gives nothing another value than it had when libraries read it."""
    return all(AT_START.get(name) == value for name, value in env.items() if name.startswith(READ_AT_START))
