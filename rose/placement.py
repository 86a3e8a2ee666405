"""Places the process it runs in, then becomes the program it is given.

    placement.py PARENT CORE|- background|normal PROGRAM [ARGUMENT…]

A program of its own, since code run between fork and exec crashes in a parent that has threads of
gRPC. Run by path with `python -I -S`: standard library only.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
ORPHANED = 75


def place(parent: int, core: str, share: str) -> None:
    """Tie this process to its parent's life, pin it, and put it below all others if asked to."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(ORPHANED)  # it died before the line above: nothing will ever tell this process
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    if share == "background":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    place(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    os.execvp(sys.argv[4], sys.argv[4:])  # noqa: S606 - becoming the program is the point
