"""Who goes first on the training core.

Trainer, gateway and the dedicated engine share one core here, where each would have its own. An
engine that steps as often as it can makes small, wasteful batches and keeps the trainer from
publishing, so it yields to both: it loses no work, it makes larger batches.
"""

import os
from collections.abc import Mapping

import psutil

from rose.demo.usage import trees

DEDICATED_NICE = 10


def yield_to_trainer(roots: Mapping[str, int], engine: str) -> None:
    """Lower the priority of every thread of `engine`."""
    for name, process in trees(roots):
        if name != engine:
            continue
        for thread in _threads(process):
            try:
                os.setpriority(os.PRIO_PROCESS, thread, DEDICATED_NICE)
            except ProcessLookupError:
                continue


def _threads(process: psutil.Process) -> list[int]:
    try:
        return [thread.id for thread in process.threads()]
    except psutil.Error:
        return []
