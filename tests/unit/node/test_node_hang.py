"""A guest that stands still is told from one that only has to wait behind a busy host."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from executor import GuestState
from rose.node.guest.supervisor import SILENT_S, STUCK_S, HangWatch
from rose.process.procfs import ProcessIdentity, group_states


@pytest.fixture
def group() -> Iterator[int]:
    argv = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def silent_for(seconds: float) -> GuestState:
    return GuestState(heartbeat_ns=time.monotonic_ns() - round(seconds * 1e9))


def judged(guest: GuestState | None, group: int | None) -> str | None:
    return HangWatch().reason(guest, group)


def test_a_slow_guest_is_left_alone(group: int) -> None:
    assert judged(silent_for(0.1), group) is None
    assert judged(silent_for(SILENT_S + 5), group) is None
    assert judged(None, group) is None
    assert judged(silent_for(STUCK_S + 1), None) is None


def test_a_stopped_guest_is_ended_once_it_is_silent(group: int) -> None:
    os.killpg(group, signal.SIGSTOP)
    while "T" not in group_states(group):
        time.sleep(0.01)
    assert judged(silent_for(0.1), group) is None
    assert "SIGSTOP" in (judged(silent_for(SILENT_S + 0.1), group) or "")


def test_a_guest_silent_beyond_what_load_explains_is_ended(group: int) -> None:
    assert "no sign of life" in (judged(silent_for(STUCK_S + 1), group) or "")


RENAMED = """
import os, time
if os.fork() == 0:
    open("/proc/self/comm", "w").write("VLLM::EngineCore")
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_guest_whose_engine_core_died_is_ended_at_once() -> None:
    """Dead engine keeps receiving traffic: its API process answers on for seconds."""
    argv = [sys.executable, "-S", "-c", RENAMED]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout
        core = int(process.stdout.readline())
        watch = HangWatch()
        assert watch.reason(silent_for(0.1), process.pid) is None
        assert watch.reason(silent_for(0.1), process.pid) is None
        os.kill(core, signal.SIGKILL)
        while ProcessIdentity.of(core):
            time.sleep(0.01)
        assert watch.reason(silent_for(0.1), process.pid) == "its engine core is dead"
        os.killpg(process.pid, signal.SIGKILL)


def test_a_process_is_not_taken_for_another_of_its_number(group: int) -> None:
    identity = ProcessIdentity.of(group)
    assert identity
    assert identity.running
    for other in (
        ProcessIdentity(group, identity.started + 1, identity.boot),
        ProcessIdentity(group, identity.started, "another boot"),
        ProcessIdentity(2**22 + 1, identity.started, identity.boot),
    ):
        assert not other.running
    os.killpg(group, signal.SIGKILL)
    while identity.running:
        time.sleep(0.01)
    assert ProcessIdentity.of(group) is None, "a zombie runs nothing"
