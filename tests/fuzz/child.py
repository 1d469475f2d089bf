"""One command of headwise in a forked child: no new interpreter, so that it takes a fraction of a second."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

SECONDS = 20.0
MEMORY = 8 << 30  # bytes a child may take beyond what it starts with
LEFT_OVER = 97  # a file that was written is not whole
Patch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; ``code`` is negative for a signal, None where it had to be stopped."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def preload() -> None:
    """Import in this process what children would import one by one, with one thread: others do not survive a fork."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    import accelerate
    import PIL.PngImagePlugin
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = ("LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification", "RobertaForSequenceClassification")
    for name in (*names, "AutoTokenizer", "AutoImageProcessor", "ViTImageProcessor", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    import headwise.cli.progress
    import headwise.papers.kit.grid
    import headwise.pipelines.compare
    import headwise.pipelines.run
    import headwise.report.page.papers
    import headwise.steps.evaluate
    import headwise.steps.heal
    import headwise.steps.search
    import headwise.steps.train

    assert accelerate and PIL and headwise
    headwise.cli.progress.FIRST_LINE = float("inf")
    gc.collect()
    gc.freeze()


def run_command(
    arguments: Sequence[str],
    folder: Path,
    *,
    patches: Sequence[Patch] = (),
    then: Callable[[], None] = lambda: None,
    seconds: float = SECONDS,
) -> Ended:
    """``headwise ARGUMENTS`` in ``folder``, and ``then`` in the same process, which raises where all is not well."""
    scratch = folder / ".said"
    scratch.mkdir(exist_ok=True)
    start = time.monotonic()
    child = os.fork()
    if not child:
        _be_the_command(arguments, folder, scratch, patches, then)
    code = _wait(child, start + seconds)
    texts = [(scratch / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return Ended(code, *texts, time.monotonic() - start)


def _wait(child: int, until: float) -> int | None:
    pause = 0.002
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, 1.2 * pause)
    os.kill(child, signal.SIGABRT)  # faulthandler says where it hangs
    time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _be_the_command(
    arguments: Sequence[str], folder: Path, scratch: Path, patches: Sequence[Patch], then: Callable[[], None]
) -> None:
    code = 1
    try:
        _stand_alone(folder, scratch)
        for patch in (offline, reopen_here, one_by_one, steady_pace, *patches):
            patch()
        from headwise.cli import main

        sys.argv = ["headwise", *arguments]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        try:
            then()
        except BaseException:
            traceback.print_exc()
            code = LEFT_OVER
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _stand_alone(folder: Path, scratch: Path) -> None:
    """Own files for what is said, own folders for what is cached, and a limit on memory."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, scratch / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, scratch / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        file = os.open(name, flags, 0o644)
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors=errors)  # noqa: PTH123, SIM115
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    faulthandler.enable(2)
    os.environ.update(XDG_CACHE_HOME=str(scratch / "cache"), HOME=str(scratch))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)


def offline() -> None:
    """Names that are no files are not looked for on the Hub, which may take as long as it likes."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def reopen_here() -> None:
    """Saved models are reopened in this process: a fresh one takes seconds, and other tests start it."""
    import subprocess

    import transformers.dynamic_module_utils as modules

    from headwise.runtime import reopen

    run = subprocess.run

    def here(command, *args, **kwargs):
        if reopen.__file__ not in command:
            return run(command, *args, **kwargs)
        with redirect_stdout(io.StringIO()) as said:
            reopen.main(*command[command.index(reopen.__file__) + 1 :])
        return subprocess.CompletedProcess(command, 0, said.getvalue(), "")

    subprocess.run = here
    modules.HF_MODULES_CACHE = os.environ["HOME"] + "/modules"


def one_by_one() -> None:
    """Experiments of the papers run in this process."""
    from headwise.papers.kit import grid

    grid._on_cores = lambda jobs: (grid.measure(job) for job in jobs)


def steady_pace() -> None:
    """Shapes of a comparison are not timed: they are all as fast."""
    from headwise.pipelines.compare import tasks

    tasks.paces = lambda trainings, device: [1000.0] * len(trainings)
