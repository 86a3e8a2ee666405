"""Who goes first on the training core.

Trainer, gateway and the dedicated engine share one core here, where each would have its own. An
engine that steps as often as it can makes small, wasteful batches and keeps the trainer from
publishing, so it yields to both: it loses no work, it makes larger batches.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

import psutil

from rose.demo.usage import trees
from rose.errors import RoseError

DEDICATED_NICE = 10


def yield_to_trainer(roots: Mapping[str, int], engine: str) -> None:
    """Lower the priority of every thread of `engine`."""
    for thread in _threads_of(roots, engine):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, DEDICATED_NICE)


def level_with_host(roots: Mapping[str, int], engine: str) -> None:
    """Give every thread of `engine` the priority that the host has: naive co-location.

    Raises RoseError when the machine does not allow it.
    """
    for thread in _threads_of(roots, engine):
        try:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, 0)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise RoseError(
                "--control naive raises the guest's priority to the host's, which needs root"
            ) from error


def _threads_of(roots: Mapping[str, int], engine: str) -> Iterator[int]:
    for name, process in trees(roots):
        if name == engine:
            yield from _threads(process)


def _threads(process: psutil.Process) -> list[int]:
    try:
        return [thread.id for thread in process.threads()]
    except psutil.Error:
        return []
