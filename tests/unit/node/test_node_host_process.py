"""The process that writes as the host: one that runs, and the one that the operator meant."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from executor import SeatState
from rose.node import host as host_watch
from rose.node.host import HostProcess
from rose.process.procfs import ProcessIdentity, pid_namespace


def seat_of(pid: int) -> SeatState:
    identity = ProcessIdentity.of(pid)
    assert identity is not None
    return SeatState(pid, identity.started, pid_namespace(), 1, 1)


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


def test_nothing_is_known_against_a_host_without_a_number() -> None:
    assert HostProcess(None).doubt(None) is None
    assert HostProcess(None).doubt(seat_of(os.getpid())) is None


def test_the_named_process_or_a_child_of_it_may_write(child: "subprocess.Popen[bytes]") -> None:
    host = HostProcess(os.getpid())
    assert host.doubt(seat_of(os.getpid())) is None
    assert host.doubt(seat_of(child.pid)) is None, "an engine core is a child"
    assert HostProcess(child.pid).doubt(seat_of(os.getpid())) == "host_foreign"
    end(child)


def test_a_host_that_ended_stays_dead_whoever_gets_its_number(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    host, seat = HostProcess(child.pid), seat_of(child.pid)
    end(child)
    assert host.doubt(None) == "host_dead"
    later = ProcessIdentity(child.pid, seat.started + 1, "boot")
    monkeypatch.setattr(
        host_watch.ProcessIdentity, "of", staticmethod(lambda pid: replace(later, pid=pid))
    )
    assert host.doubt(None) == "host_dead"


def test_a_lock_that_a_child_of_a_dead_host_holds_is_worth_nothing(
    child: "subprocess.Popen[bytes]",
) -> None:
    seat = seat_of(child.pid)
    end(child)
    assert HostProcess(None).doubt(seat) == "host_dead"
    assert HostProcess(None).doubt(replace(seat_of(os.getpid()), started=1)) == "host_dead"


def test_a_process_of_another_user_is_no_error() -> None:
    """Process 1 is another user's wherever this is not run by root."""
    assert HostProcess(1).doubt(None) is None


@pytest.mark.parametrize("change", [{"pid_namespace": 1}, {"started": 0}])
def test_numbers_of_another_namespace_say_nothing(change: dict[str, int]) -> None:
    seat = replace(SeatState(2**22, 5, pid_namespace(), 1, 1), **change)
    assert HostProcess(None).doubt(seat) is None
