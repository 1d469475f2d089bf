"""Imports all that commands import, once for all processes that are forked from here."""

import importlib
import io
import pkgutil
from contextlib import redirect_stdout

import accelerate  # noqa: F401
import rich.progress  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import headwise
from headwise.cli import app, progress

for module in pkgutil.walk_packages(headwise.__path__, "headwise."):
    if not module.name.startswith(("headwise.__main__", "headwise.papers")):  # scikit-learn begins threads
        importlib.import_module(module.name)
progress.FIRST_LINE = float("inf")  # however busy the machine is, quick work says nothing
with redirect_stdout(io.StringIO()):
    for options in (["--version"], ["--help"]):  # what is imported at the first call
        app(options, standalone_mode=False)
