"""No sequence of deaths, restarts, failed attaches and replaced pages of a host gives its guest a
step while the host has work.

Files, locks, guard and gate are the real ones. Engine processes are modelled: a death gives up what
the process locked and writes nothing, as the kernel does it, and every living one beats.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import (
    ControlPage,
    HostSeat,
    HostState,
    HostView,
    PageError,
    Run,
    Veto,
)
from executor.control_page.page import PAGE_FOLDER
from executor.guest.gate_client import EngineLoad, GateClient, KvMapped
from rose.logs.eventlog import EventLog
from tests.fakes.guarded_guest import guard_thread

MS = 1_000_000
TICKS_OF_A_BEAT = 5
MOST_HOSTS = 3

Script = list[tuple[str, int]]


@dataclass
class EngineHost:
    """An engine process; `seat` while it publishes, `veto` once it cannot."""

    seat: HostSeat | None = None
    veto: Veto | None = None
    working: bool = False
    stopped: bool = False

    def publish(self, now_ns: int) -> None:
        if self.seat is not None and self.veto is None:
            self.seat.write(HostState(running=int(self.working), heartbeat_ns=now_ns))

    def beat(self, now_ns: int) -> None:
        if self.stopped:
            return
        if self.seat is not None and self.veto is None:
            self.seat.beat(now_ns)
        if self.veto is not None:
            self.veto.renew()

    def die(self) -> None:
        for held in (self.seat, self.veto):
            if held is not None:
                held.close()


class Machine:
    """One page's path, the engines that were started on it, a node and its guest."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.path = folder / "page"
        self.stack = stack
        self.now_ns = 1_000_000 * MS
        self.hosts: list[EngineHost] = []
        self.steps = 0
        self.violated = False
        self.log = EventLog(folder, "node")
        stack.callback(self.log.close)
        self.start_node(0)
        self.start_guest(0)

    def page(self) -> ControlPage:
        page = ControlPage.ensure(self.path)
        self.stack.callback(page.close)
        return page

    def start_node(self, _: int) -> None:
        self.guard = guard_thread(
            self.page(), self.folder, events=self.log, clock_ns=lambda: self.now_ns
        )

    def start_guest(self, _: int) -> None:
        self.guest = GateClient(
            self.page(), KvMapped(1), clock_ns=lambda: self.now_ns, sleep=lambda _: None, environ={}
        )

    def start_host(self, _: int) -> None:
        if len(self.hosts) == MOST_HOSTS:
            return
        host = EngineHost()
        self.hosts.append(host)
        try:
            host.seat = self.page().take_host(self.now_ns)
        except PageError:
            self.give_up(host)
        host.publish(self.now_ns)

    def start_host_that_cannot_attach(self, _: int) -> None:
        if len(self.hosts) < MOST_HOSTS:
            self.hosts.append(EngineHost())
            self.give_up(self.hosts[-1])

    def give_up(self, host: EngineHost) -> None:
        if host.seat is not None:
            host.seat.cease()
        if host.veto is None:
            host.veto = Veto(self.path)
            host.veto.renew()

    def kill_host(self, number: int) -> None:
        if self.hosts:
            self.hosts.pop(number % len(self.hosts)).die()

    def change(self, number: int, change: Callable[[EngineHost], None]) -> None:
        if self.hosts:
            host = self.hosts[number % len(self.hosts)]
            change(host)
            host.publish(self.now_ns)

    def request(self, number: int) -> None:
        def come(host: EngineHost) -> None:
            host.working = host.working or not host.stopped

        self.change(number, come)

    def serve(self, number: int) -> None:
        def end(host: EngineHost) -> None:
            host.working = host.working and host.stopped

        self.change(number, end)

    def break_plugin(self, number: int) -> None:
        self.change(number, self.give_up)

    def stop_host(self, number: int) -> None:
        self.change(number, lambda host: setattr(host, "stopped", not host.stopped))

    def delete_page(self, _: int) -> None:
        self.path.unlink(missing_ok=True)

    def replace_page(self, _: int) -> None:
        self.delete_page(0)
        self.page()

    def wait(self, beats: int) -> None:
        for _ in range(beats % 8 + 1):
            for _ in range(TICKS_OF_A_BEAT):
                self.now_ns += 50 * MS
                self.look()
            for host in self.hosts:
                host.beat(self.now_ns)
            self.look()

    def look(self) -> None:
        """One tick of the guard, and one question of the guest."""
        self.guard.tick()
        if isinstance(self.guest.ask(EngineLoad(1, 0, 0)), Run):
            self.steps += 1
            self.violated |= any(host.working for host in self.hosts)

    def play(self, script: Script) -> None:
        for action, number in script:
            getattr(self, action)(number)
            self.look()


ACTIONS = (
    "start_node", "start_guest", "start_host", "start_host_that_cannot_attach", "kill_host",
    "request", "serve", "break_plugin", "stop_host", "delete_page", "replace_page", "wait",
)  # fmt: skip


def played(script: Script) -> Machine:
    with tempfile.TemporaryDirectory(dir=PAGE_FOLDER) as folder, ExitStack() as stack:
        machine = Machine(Path(folder), stack)
        machine.play(script)
        while machine.hosts:
            machine.kill_host(0)
        return machine


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=25))
def test_a_guest_gets_no_step_while_any_host_has_work(script: Script) -> None:
    assert not played(script).violated


IDLE: Script = [("start_host", 0), ("wait", 7)]
NEW_LIFE: Script = [("kill_host", 0), ("start_host_that_cannot_attach", 0), ("request", 0)]


def test_beside_an_idle_host_a_guest_runs() -> None:
    assert played(IDLE).steps > 10
    assert played([*IDLE, ("request", 0), ("wait", 7), ("serve", 0)]).steps > 10


@pytest.mark.parametrize(
    ("doubt", "script"),
    [
        ("no_host", [*IDLE, *NEW_LIFE]),
        ("host_veto", [*IDLE, ("start_host_that_cannot_attach", 0), ("request", 1)]),
        ("host_veto", [*IDLE, ("start_host", 0), ("request", 1)]),
        ("page_replaced", [*IDLE, ("replace_page", 0), ("start_host", 0), ("request", 1)]),
        (
            "host_starting",
            [
                *IDLE,
                ("request", 0),
                ("replace_page", 0),
                ("start_node", 0),
                ("start_guest", 0),
                ("start_host", 0),
            ],
        ),
    ],
)
def test_each_check_is_what_keeps_the_guest_from_a_step(
    monkeypatch: pytest.MonkeyPatch, doubt: str, script: Script
) -> None:
    assert not played(script).violated
    check = HostView.doubt

    def blind(view: HostView, now_ns: int) -> str | None:
        found = check(view, now_ns)
        return None if found == doubt else found

    monkeypatch.setattr(HostView, "doubt", blind)
    assert played(script).violated


def test_an_idle_host_that_stands_still_is_believed_for_a_second_and_no_longer() -> None:
    begun = [*IDLE, ("stop_host", 0), ("wait", 3)]
    steps = played(begun).steps
    assert played([*begun, ("wait", 7)]).steps <= steps + 2


def test_processes_of_this_test_leave_no_lock_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    played([*IDLE, ("replace_page", 0), ("start_host_that_cannot_attach", 0), ("wait", 7)])
    assert len(os.listdir("/proc/self/fd")) <= before + 2
