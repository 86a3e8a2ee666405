"""Background scheduling and pinning of a real process."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from executor import ExecutorError, make_background, pin

CHILD = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_all_threads_go_to_the_background_and_the_answer_is_true(child: int) -> None:
    applied = make_background(child)
    assert applied.threads == 2
    for tid in map(int, os.listdir(f"/proc/{child}/task")):
        if applied.policy == "SCHED_IDLE":
            assert os.sched_getscheduler(tid) == os.SCHED_IDLE
        elif applied.policy == "nice":
            assert os.getpriority(os.PRIO_PROCESS, tid) == 19
    assert applied.policy == "none" or applied.refused == 0


def test_all_threads_are_pinned(child: int) -> None:
    core = min(os.sched_getaffinity(0))
    assert pin(child, [core]) == 2
    for tid in map(int, os.listdir(f"/proc/{child}/task")):
        assert os.sched_getaffinity(tid) == {core}


def test_what_cannot_be_done_is_an_error(child: int) -> None:
    with pytest.raises(ExecutorError, match="cannot pin"):
        pin(child, [100_000])
    with pytest.raises(ExecutorError, match="no process"):
        make_background(2**22 + 1)
