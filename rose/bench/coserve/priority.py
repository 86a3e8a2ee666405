"""Where and how the kernel runs an engine that runs already: a bench moves it between arms."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

_ROUNDS = 5
_PRIORITY = os.sched_param(0)


def pin(pid: int, cores: Collection[int]) -> None:
    """Bind all threads of a process to these cores."""
    _for_threads(pid, lambda thread: os.sched_setaffinity(thread, cores))


def make_background(pid: int) -> None:
    """Put all threads of a process behind everybody else's."""
    _for_threads(pid, lambda thread: os.sched_setscheduler(thread, os.SCHED_IDLE, _PRIORITY))


def make_foreground(pid: int) -> None:
    """Put all threads of a process back among everybody else's; it takes the right to do so."""
    _for_threads(pid, lambda thread: os.sched_setscheduler(thread, os.SCHED_OTHER, _PRIORITY))


def family(pid: int) -> list[int]:
    """A process and all that came from it."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def _for_threads(pid: int, apply: Callable[[int], None]) -> None:
    # A thread may start others while we look: go round until a look finds no new one.
    done: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = {int(name) for name in os.listdir(Path("/proc", str(pid), "task"))} - done
        for thread in fresh:
            try:
                apply(thread)
            except ProcessLookupError:
                continue
        if not fresh:
            return
        done |= fresh
