"""Training on Accelerate: one process or many, checkpoints that survive a kill. Knows nothing of attention."""

from importlib.util import find_spec

from headwise.files.errors import InputError

if find_spec("accelerate") is None:
    raise InputError('Training needs Accelerate: pip install "headwise[train]".')
