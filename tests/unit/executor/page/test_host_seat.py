"""A page's host: one living process, by the kernel's word, and no other one unseen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor import ControlPage, HostState, PageError, Veto
from tests.harness.seated_host import SeatedHost
from tests.harness.waiting import PATIENCE_S

SECOND = 10**9

HOST = """
import sys, time
from executor import ControlPage, HostState
page = ControlPage.open(sys.argv[1])
seat = page.take_host()
seat.write(HostState(heartbeat_ns=time.monotonic_ns()))
FORK
seat.start()
print("ready", flush=True)
time.sleep(60)
"""
FORKED = """
import os
if (child := os.fork()) == 0:
    time.sleep(60)
print(child, flush=True)
"""


def doubt(page: ControlPage) -> str | None:
    return page.host_view().doubt(time.monotonic_ns())


def started(page: ControlPage, program: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", program, str(page.path)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ended(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_an_idle_host_is_believed_for_as_long_as_it_beats(page: ControlPage) -> None:
    assert doubt(page) == "no_host"
    now_ns = 100 * SECOND
    host = SeatedHost(page, lambda: now_ns)
    host.tell()
    view = page.host_view()
    assert view.doubt(now_ns) is None
    state = view.believed(now_ns + SECOND)
    assert state is not None
    assert state.idle
    assert view.doubt(now_ns + SECOND + 1) == "host_silent"
    now_ns += 3600 * SECOND
    host.beat()
    assert page.host_view().doubt(now_ns) is None, "an hour without a request is no silence"
    host.close()
    assert page.host_view().doubt(now_ns) == "no_host"


def test_nothing_of_an_earlier_life_is_believed(page: ControlPage) -> None:
    first = SeatedHost(page)
    first.tell()
    first.close()
    with ControlPage.open(page.path) as successor:
        seat = successor.take_host()
        state = page.host.read()
        assert state is not None
        assert not state.idle, "a host that starts is busy until it says otherwise"
        assert doubt(page) == "host_starting"
        seat.close()


def test_a_page_has_one_host_and_names_it(page: ControlPage) -> None:
    host = SeatedHost(page)
    with pytest.raises(PageError, match=f"has a host: process {os.getpid()}"):
        page.take_host()
    host.close()
    page.take_host().close()


def test_the_kernel_tells_of_a_killed_host_at_once(page: ControlPage) -> None:
    host = started(page, HOST.replace("FORK", ""))
    assert said(host) == "ready"
    seat = page.seat.read()
    assert seat is not None
    assert (seat.pid, doubt(page)) == (host.pid, "host_starting")
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert doubt(page) == "no_host"
    ended(host)


def test_a_child_that_a_host_forked_does_not_hold_its_seat(page: ControlPage) -> None:
    host = started(page, HOST.replace("FORK", FORKED))
    child = int(said(host))
    assert said(host) == "ready"
    try:
        host.send_signal(signal.SIGKILL)
        host.wait()
        os.kill(child, 0)
        # A child lets go in its first step after the fork, which a busy machine gives it late.
        until_s = time.monotonic() + PATIENCE_S
        while doubt(page) != "no_host" and time.monotonic() < until_s:
            time.sleep(0.01)
        assert doubt(page) == "no_host"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        ended(host)


def test_a_host_beats_by_itself_and_stays_what_it_said(page: ControlPage) -> None:
    seat = page.take_host()
    seat.start()
    first = page.seat.read()
    until_s = time.monotonic() + 10
    while page.seat.read() == first:
        assert time.monotonic() < until_s, "no beat"
        time.sleep(0.01)
    state = page.host.read()
    assert state is not None
    assert not state.idle, "a beat says nothing of work"
    seat.write(HostState(heartbeat_ns=time.monotonic_ns()))
    seat.cease()
    state = page.host.read()
    assert state is not None
    assert not state.idle, "one that publishes no more is busy"
    assert doubt(page) is not None
    seat.close()


def test_a_veto_outweighs_an_idle_host_until_it_is_gone(page: ControlPage) -> None:
    host = SeatedHost(page)
    host.tell()
    ControlPage.open(page.path).close()
    assert doubt(page) is None, "closing another mapping gives no lock up"
    vetoes = [Veto(page.path), Veto(page.path)]
    for veto in vetoes:
        veto.renew()
    assert doubt(page) == "host_veto"
    vetoes[0].close()
    assert doubt(page) == "host_veto"
    vetoes[1].close()
    assert doubt(page) is None
    host.close()


def test_a_page_that_was_replaced_is_noticed_and_vetoed_by_its_host(page: ControlPage) -> None:
    host = SeatedHost(page)
    host.tell()
    page.path.unlink()
    assert doubt(page) == "page_replaced"
    with ControlPage.create(page.path) as fresh:
        assert doubt(page) == "page_replaced"
        assert fresh.host_view().doubt(time.monotonic_ns()) == "no_host"
        with pytest.raises(PageError, match="another file"):
            page.take_host()
        other = SeatedHost(fresh)
        other.tell()
        assert fresh.host_view().doubt(time.monotonic_ns()) is None
        host.beat()
        assert fresh.host_view().doubt(time.monotonic_ns()) == "host_veto"
        host.close()
        assert fresh.host_view().doubt(time.monotonic_ns()) is None
        other.close()


@pytest.mark.parametrize("what", ["missing", "fifo", "folder"])
def test_a_veto_where_there_is_no_page_waits_for_one(tmp_path: Path, what: str) -> None:
    path = tmp_path / "page"
    veto = Veto(path)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    veto.renew()
    if what != "missing":
        path.rename(tmp_path / "away")
    with ControlPage.create(path) as page:
        host = SeatedHost(page)
        host.tell()
        veto.renew()
        assert doubt(page) == "host_veto"
        veto.close()
        host.close()
