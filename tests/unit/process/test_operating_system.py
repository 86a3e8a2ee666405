"""Processes, ports and files of this machine: killed groups, exposed ports, locked files."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rose.process import child
from rose.process.child import ManagedProcess, ProcessSpec
from rose.process.filelock import HeldFile
from rose.process.launcher import kill_group
from rose.process.procfs import exposed_at, group_states
from tests.harness.waiting import PATIENCE_S, until

HANG = "import time; time.sleep(60)"
HELD_BYTES = 256 << 20
HOST = "import os; os.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"
GUEST = """
import os, time
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
held = b"x" * %d
print(flush=True)
time.sleep(60)
"""


def start(script: str) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-S", "-c", script]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0)
    assert process.stdout
    process.stdout.readline()
    return process


@pytest.fixture
def pair() -> Iterator[tuple["subprocess.Popen[bytes]", "subprocess.Popen[bytes]"]]:
    """A guest, then a host that never rests, on one core."""
    core = max(os.sched_getaffinity(0))
    guest, host = start(GUEST % (core, HELD_BYTES)), start(HOST % core)
    yield guest, host
    for process in (guest, host):
        process.kill()
        process.communicate()


def test_a_killed_guest_does_not_wait_for_a_saturated_host(
    pair: tuple["subprocess.Popen[bytes]", "subprocess.Popen[bytes]"],
) -> None:
    guest, host = pair
    # By the host's own time on the core: other processes of a busy machine take theirs from both.
    host_cpu = psutil.Process(host.pid).cpu_times
    began_s = host_cpu().user
    kill_group(guest.pid)
    until(lambda: not group_states(guest.pid), PATIENCE_S, "the guest is gone")
    assert host_cpu().user - began_s < 2.0
    assert host.poll() is None
    assert guest.wait() == -signal.SIGKILL


async def test_a_group_is_killed_without_a_descriptor_to_look_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", path)

    process = await ManagedProcess.start(ProcessSpec("child", [sys.executable, "-S", "-c", HANG]))
    with monkeypatch.context() as without:
        without.setattr(os, "scandir", full)
        without.setattr(os, "listdir", full)
        without.setattr(child, "KILL_GRACE_S", 0.01)
        await process.kill()
        assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("127.0.0.1", None),
        ("127.0.0.2", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
    ],
)
def test_a_port_is_exposed_unless_it_listens_on_loopback_alone(
    address: str, exposed: str | None
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        if family is socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, "." not in address)
        server.bind((address, 0))
        server.listen()
        assert exposed_at(server.getsockname()[1]) == exposed


def test_a_connection_and_another_port_are_no_listeners() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert exposed_at(connection.getsockname()[1]) is None
    assert exposed_at(port) is None


def test_folders_of_a_held_file_are_for_this_user_alone(tmp_path: Path) -> None:
    HeldFile.take(tmp_path / "run" / "guests" / "g0.json").close()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "run", tmp_path / "run/guests")]
    assert modes == [0o700, 0o700]
