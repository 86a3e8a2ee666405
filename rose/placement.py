"""Places the process it runs in, then becomes the program it is given.

    placement.py PARENT CORE|- background|normal family|alone PROGRAM [ARGUMENT…]

    parent dies ──SIGKILL──► program dies ──SIGUSR1──► watcher ──SIGKILL──► the whole group

The watcher exists for a `family` only: a program whose own children would outlive it. A program of
its own, since code run between fork and exec crashes in a parent that has threads of gRPC. Run by
path with `python -I -S`: standard library only.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
ORPHANED = 75


def die_with(parent: int, death: signal.Signals) -> None:
    """Let the kernel send `death` to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death)
    if os.getppid() != parent:
        sys.exit(ORPHANED)  # it died before the line above: nothing will ever tell this process


def watch(leader: int) -> None:
    """Start the watcher that ends this process group once its leader, this process, is gone."""
    # Blocked before the fork, so that no signal finds the watcher unprepared.
    stops = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        if os.getppid() == leader:
            signal.sigwait({signal.SIGUSR1})
        os.killpg(leader, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)


def place(core: str, share: str) -> None:
    """Pin this process, and put it below all others if asked to."""
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    if share == "background":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    die_with(int(sys.argv[1]), signal.SIGKILL)
    if sys.argv[4] == "family":
        watch(os.getpid())
    place(sys.argv[2], sys.argv[3])
    os.execvp(sys.argv[5], sys.argv[5:])  # noqa: S606 - becoming the program is the point
