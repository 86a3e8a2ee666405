"""Isolation below the gate: what the kernel offers to any process, on Linux.

A guest that runs under SCHED_IDLE gets a core only when nobody else wants it, so a host woken by a
request takes the core at once, in the middle of a guest's step.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from executor.errors import ExecutorError

SCHED_IDLE = "SCHED_IDLE"
NICE = "nice"
NONE = "none"
_NICEST = 19
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Background:
    """What was applied: `policy` is the weakest of all threads', the counts are threads."""

    policy: str
    threads: int
    refused: int


def make_background(pid: int) -> Background:
    """Put all threads of `pid` behind everybody else's: SCHED_IDLE, or else nice 19.

    Threads and processes started later inherit it; call it for each process of a group. Raises
    ExecutorError when there is no such process.
    """
    idle = _for_threads(pid, _sched_idle)
    if not idle.refused:
        return Background(SCHED_IDLE, idle.threads, 0)
    nice = _for_threads(pid, _nicest)
    return Background(NONE if nice.refused else NICE, nice.threads, nice.refused)


def pin(pid: int, cores: Iterable[int]) -> int:
    """Bind all threads of `pid` to `cores`, return how many; ExecutorError when refused."""
    wanted = frozenset(cores)
    try:
        applied = _for_threads(pid, lambda tid: os.sched_setaffinity(tid, wanted))
    except OSError as error:
        raise ExecutorError(
            f"cannot pin {pid} to cores {sorted(wanted)}: {error.strerror}"
        ) from error
    if applied.refused:
        raise ExecutorError(f"cannot pin {pid}: not permitted for {applied.refused} threads")
    return applied.threads


def _sched_idle(tid: int) -> None:
    os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))


def _nicest(tid: int) -> None:
    os.setpriority(os.PRIO_PROCESS, tid, _NICEST)


def _for_threads(pid: int, apply: Callable[[int], None]) -> Background:
    # A thread may start others while we look: go round until a look finds no new one.
    done: set[int] = set()
    refused: set[int] = set()
    for _ in range(_ROUNDS):
        fresh = _threads(pid) - done
        if not fresh:
            break
        for tid in fresh:
            try:
                apply(tid)
            except PermissionError:
                refused.add(tid)
            except ProcessLookupError:
                continue
            done.add(tid)
    return Background(NONE, len(done) - len(refused), len(refused))


def _threads(pid: int) -> set[int]:
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except FileNotFoundError:
        raise ExecutorError(f"no process {pid}: it ended before it could be isolated") from None
