"""A Python process that has imported what tests need and forks for each request.

    python -m tests.forks SOCKET MODULE...

A fork is a process of its own, with its own exit code, folder, environment and signals, but starts in hundredths of a
second. A request comes over a connection of its own, as three file descriptors for standard input, output and error and
one of a file of JSON; the answers are the process id and, when that process has ended, its status.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

INT = 8  # bytes of a process id or status


def serve(place: str) -> dict[str, Any]:
    """Answer requests until standard input ends; return only in the forked processes, each its request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if not os.fork():
                    listener.close()
                    return _keep(connection)
            _reap(os.WNOHANG)
    _reap(0)
    sys.exit()


def _reap(options: int) -> None:
    """Wait for the keepers that have ended, or for all: so that their seconds are counted."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _keep(connection: socket.socket) -> dict[str, Any]:
    """Fork once more, wait for that process and send its status: the client is not its parent and cannot wait."""
    _, files, _, _ = socket.recv_fds(connection, 1, 4)
    pid = os.fork()
    if pid:
        connection.sendall(pid.to_bytes(INT, "big"))
        connection.sendall(os.waitpid(pid, 0)[1].to_bytes(INT, "big"))
        os._exit(0)
    connection.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, file in enumerate(files[:3]):
        os.dup2(file, target)
        os.close(file)
    with os.fdopen(files[3], "rb") as request:
        request.seek(0)
        return json.load(request)


def become(request: dict[str, Any]) -> None:
    """Stand where ``python -c`` would: folder, environment and arguments, and random numbers of one's own."""
    os.chdir(request["cwd"])
    sys.path[0] = ""
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = request["argv"]
    if modules := sys.modules.get("transformers.dynamic_module_utils"):
        modules.HF_MODULES_CACHE = os.environ.get("HF_MODULES_CACHE", modules.HF_MODULES_CACHE)  # read when imported
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def preload(modules: Iterable[str]) -> None:
    """Import, without anything running beside: a fork takes along no thread but the one that forks."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    threads = list(Path("/proc/self").glob("task/*"))  # none but on Linux
    assert len(threads) < 2, f"{len(threads)} threads are running after {', '.join(modules)}"


def run(code: str) -> NoReturn:
    """Run code as a script and end as Python does, except that nothing is taken apart: that takes 0.3 s with torch."""
    status = 0
    try:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # waits for threads, as at the end of the interpreter
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(sys.argv[2:])
    request = serve(sys.argv[1])
    become(request)
    run(request["code"])
