"""A real vLLM host of two engine cores on one page: both publish, and both have to be idle."""

import http.client
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from engine_specs import BESIDE_PARALLEL, PARALLEL
from pool import Started
from test_coserve import complete

from executor import FreezeReason, HostState, HostView
from executor.control_page.host_seat import BEAT_S, is_in_use
from rose.node.host import HostProcess
from tests.harness.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(PARALLEL, BESIDE_PARALLEL, spends=True),
    pytest.mark.timeout(600),
]

STEADY_S = 0.3


@pytest.fixture(scope="module")
def host(engines: list[Started]) -> Started:
    return engines[0]


@pytest.fixture(scope="module")
def guest(engines: list[Started]) -> Started:
    return engines[1]


def view(host: Started) -> HostView:
    return host.control.host_view()


def states(host: Started) -> list[HostState]:
    """Return the state of each engine core; a core that is just writing is read again."""
    found: list[HostState] = []

    def whole() -> bool:
        found[:] = [core.state for core in view(host).cores if core.state is not None]
        return len(found) == 2

    until(whole, 5.0, "both cores' sections are whole")
    return found


def guest_steps(guest: Started) -> int:
    until(lambda: guest.control.guest.peek() is not None, 5.0, "the guest's section is whole")
    state = guest.control.guest.peek()
    return state.step_seq if state is not None else guest_steps(guest)


def asked(engine: Started, name: str, tokens: int) -> threading.Thread:
    def ask() -> None:
        with suppress(OSError, http.client.HTTPException):  # Its engine is killed.
            complete(engine, name, tokens)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def steadily(check: Callable[[], bool]) -> bool:
    """Return True if the check holds at every look for STEADY_S."""
    end_s = time.monotonic() + STEADY_S
    while time.monotonic() < end_s:
        if not check():
            return False
        time.sleep(0.002)
    return True


def test_both_cores_have_a_seat_and_count(host: Started) -> None:
    until(lambda: view(host).doubt(time.monotonic_ns()) is None, 10.0, "the host counts")
    seats = [seat for seat in view(host).seats if seat is not None]
    assert [seat.cores for seat in seats] == [2, 2]
    assert len({seat.pid for seat in seats}) == 2
    assert HostProcess(host.pid).doubt(*seats) is None, "both are the host's"
    assert all(state.kv_total > 0 and state.idle for state in states(host))


def test_each_core_lends_its_own_memory_and_the_least_is_promised(host: Started) -> None:
    until(lambda: all(state.bytes_lent for state in states(host)), 20.0, "both lend")
    each = states(host)
    merged = host.control.host_state
    assert merged is not None
    assert 0 < merged.bytes_lent <= min(state.bytes_lent for state in each)
    assert merged.kv_total == sum(state.kv_total for state in each)


def test_requests_spread_over_the_cores_and_each_has_its_latencies(host: Started) -> None:
    before, cursor = states(host), host.control.latency.cursor
    asking = [asked(host, f"spread-{number}", 40) for number in range(6)]
    for thread in asking:
        thread.join(60)
    gained = [new.step_seq - old.step_seq for new, old in zip(states(host), before, strict=True)]
    assert min(gained) > 10
    until(
        lambda: len(host.control.latency.drain(cursor).records) == 6, 10.0, "all have their record"
    )


def test_the_guest_runs_only_while_both_cores_are_idle(host: Started, guest: Started) -> None:
    """One request keeps one core busy; each core has its turn."""
    busy_alone: set[int] = set()
    rolling = asked(guest, "rolling", 450)

    def goes_on() -> None:
        last = guest_steps(guest)
        until(lambda: guest_steps(guest) > last, 20.0, "the guest runs beside two idle cores")

    goes_on()
    for number in range(8):
        serving = asked(host, f"serving-{number}", 200)
        until(lambda: any(not state.idle for state in states(host)), 10.0, "a core is busy")
        time.sleep(0.1)  # A step that had begun ends.
        last = guest_steps(guest)
        while serving.is_alive():
            busy = [core for core, state in enumerate(states(host)) if not state.idle]
            steps = guest_steps(guest)
            if busy and any(not state.idle for state in states(host)):
                assert steps == last
                busy_alone |= set(busy) if len(busy) == 1 else set()
            last = steps
        goes_on()
        if busy_alone == {0, 1}:
            break
    assert busy_alone == {0, 1}
    rolling.join(60)
    assert not rolling.is_alive()


def test_a_killed_core_freezes_the_guest_within_a_beat_and_leaves_nothing(
    host: Started, guest: Started
) -> None:
    began = guest_steps(guest)
    rolling = asked(guest, "killed", 450)
    until(lambda: guest_steps(guest) > began, 20.0, "the guest runs")
    seats = [seat for seat in view(host).seats if seat is not None]
    host.spend("a core of it is killed")
    guest.spend("it has no host")
    family = psutil.Process(host.pid).children(recursive=True)
    psutil.Process(seats[1].pid).send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    until(
        lambda: view(host).doubt(time.monotonic_ns()) is FreezeReason.NO_HOST, 5.0, "it is missed"
    )
    assert time.monotonic() - killed_s < BEAT_S
    time.sleep(0.1)  # A step that had begun ends.
    steps = guest_steps(guest)
    assert steadily(lambda: guest_steps(guest) == steps)
    until(lambda: host.ended, 60.0, "vLLM ends with its core")
    psutil.wait_procs(family, timeout=30)
    assert not [process for process in family if process.is_running()]
    host.node.stop()
    guest.signal(signal.SIGKILL)
    until(lambda: not is_in_use(host.control._descriptor), 10.0, "no lock is left")
    rolling.join(10)
