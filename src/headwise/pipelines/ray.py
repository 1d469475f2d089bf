"""Independent pieces of work on Ray: a cluster that is there already, or one of this machine's processors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from headwise.files.errors import InputError

T = TypeVar("T")
R = TypeVar("R")


def on_ray(work: Callable[[T], R], pieces: Sequence[T], *, gpu: bool = False) -> Generator[R, None, None]:
    """Do ``work`` on all pieces, as many at once as there are processors; what comes out, in the order they end.

    With ``gpu`` each takes one of the cluster's GPUs, if it has any.
    """
    try:
        import ray  # noqa: PLC0415 - slow to import, and only asked for at times
        from ray.exceptions import RayError, RayTaskError  # noqa: PLC0415
    except ImportError:
        raise InputError('Ray is not installed: pip install "headwise[ray]", or leave out `on` ray.') from None
    if not pieces:
        return
    if not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise InputError(f"Ray cannot be reached: {error}") from None
    gpus = 1 if gpu and ray.cluster_resources().get("GPU") else 0
    remote = ray.remote(num_cpus=1, num_gpus=gpus)(work)
    waiting = [remote.remote(piece) for piece in pieces]
    try:
        while waiting:
            (ready,), waiting = ray.wait(waiting)
            yield ray.get(ready)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise InputError(f"A task on Ray ended early: {error}") from error
    finally:
        for each in waiting:
            ray.cancel(each, force=True)
