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

    def level(thread: int) -> None:
        os.sched_setscheduler(thread, os.SCHED_OTHER, _PRIORITY)
        os.setpriority(os.PRIO_PROCESS, thread, 0)

    _for_threads(pid, level)


def make_nicer(pid: int, nice: int) -> None:
    """Let all threads of a process yield to others by so much."""
    _for_threads(pid, lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice))


def family(pid: int) -> list[int]:
    """A process and all that came from it."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def _for_threads(pid: int, apply: Callable[[int], None]) -> None:
    # A thread may start others while we look: go round until a look finds no new one.
    done: set[int] = set()
    for _ in range(_ROUNDS):
        try:
            fresh = {int(name) for name in os.listdir(Path("/proc", str(pid), "task"))} - done
        except FileNotFoundError:
            return  # it has ended
        for thread in fresh:
            try:
                apply(thread)
            except ProcessLookupError:
                continue
        if not fresh:
            return
        done |= fresh
