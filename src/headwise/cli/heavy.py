"""Importing torch and transformers, which only some commands need."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None, None, None]:
    """Import torch and transformers, quickly and quietly.

    The garbage collector finds nothing in them but takes a third of the time, then again when the process ends.
    """
    gc.disable()
    try:
        yield
        import huggingface_hub
        import transformers
    finally:
        gc.freeze()
        gc.enable()
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def typed() -> str:
    """The command as it was typed, for cards."""
    return shlex.join(["headwise", *sys.argv[1:]])
