"""The host's side: its page, who publishes there, its process, its clock."""

import grp
import os
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from executor import ControlPage, PageError
from executor.control_page import LAYOUT_VERSION
from executor.host_sight import BEAT_STALE_NS
from rose.doctor.finding import Finding, checked, note, ok, wrong
from rose.node.engine_config import HostConfig
from rose.node.host_process import HostProcess

# Fifty grants a second are written; a host in a step writes at its end, which may take a while.
GRANT_STALE_S = 1.0
HOST_STALE_S = 30.0
_NS = 1e9


def host_checks(host: HostConfig, *, daemon_runs: bool) -> Iterator[Finding]:
    """Findings about one host."""
    yield checked("page", partial(_page, host))
    yield checked("host", partial(_alive, host))
    if host.page.exists():
        yield checked("host seat", partial(_seat, host))
        yield checked("host heartbeat", partial(_heartbeat, host))
        if daemon_runs:
            yield checked("grant heartbeat", partial(_grant, host))
    yield checked("clock", partial(_clock, host.pid))


def _open(host: HostConfig) -> ControlPage:
    return ControlPage.open(host.page, host.page_group)


def _page(host: HostConfig) -> Finding:
    path = host.page
    if not path.exists():
        return note("page", f"none at {path}", "whoever starts first, host or node, makes it")
    try:
        with _open(host) as page:
            owner = f"layout {LAYOUT_VERSION}, made by process {page.owner_pid}"
            return ok("page", f"{path}, {owner}, {_access(path)}")
    except PageError as error:
        what, _, do = str(error).partition("; ")
        return wrong("page", what, do or "delete it, then start host and node again")


def _access(path: Path) -> str:
    """Who may map it."""
    status = path.stat()
    if not status.st_mode & 0o070:
        return f"for uid {status.st_uid} alone"
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"for group {group} (mode {stat.S_IMODE(status.st_mode):o})"


def _alive(host: HostConfig) -> Finding:
    pid = host.pid
    if pid is None:
        return note(
            "host", "no pid is given", "set host.pid, or any engine on the page is the host"
        )
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return wrong("host", f"process {pid} is gone", "start the host, write its pid to host.pid")
    except PermissionError:
        if not host.page_group:
            do = "run the node as that user, or name a host.page_group that both are in"
            return wrong("host", f"process {pid} is another user's", do)
        return ok("host", f"process {pid} lives, as another user's")
    return ok("host", f"process {pid} lives")


def _seat(host: HostConfig) -> Finding:
    """Whether a process that lives publishes here, and no other serves unseen."""
    with _open(host) as page:
        sight = page.host_sight()
    if sight.vetoed:
        what = "an engine serves on this page that cannot publish there; guests are frozen"
        do = (
            "look at the host's log: an untested vLLM, a ROSE_ variable it cannot read,"
            " data_parallel_size above 1, or a second engine core"
        )
        return wrong("host seat", what, do)
    if not sight.seated:
        what = "no process publishes on this page; guests are frozen"
        do = (
            "start the host with --scheduler-cls executor.vllm.host.ObservedScheduler and"
            " ROSE_ROLE=host; start it again if the page was deleted since"
        )
        return wrong("host seat", what, do)
    seat = sight.seat
    if doubt := HostProcess(host.pid).doubt(seat):
        do = "write to host.pid the process that started the host, and start the node again"
        return wrong("host seat", f"who publishes is not the host ({doubt})", do)
    return ok("host seat", f"held by process {seat.pid}" if seat else "held")


def _heartbeat(host: HostConfig) -> Finding:
    subject = "host heartbeat"
    with _open(host) as page:
        state, seat = page.host.read(), page.seat.read()
    if state is None or seat is None:
        do = "start it with --scheduler-cls executor.vllm.host.ObservedScheduler, ROSE_ROLE=host"
        return wrong(subject, "the host has never written to its page", do)
    now_ns = time.monotonic_ns()
    beat_s = (now_ns - seat.beat_ns) / _NS
    if beat_s * _NS > BEAT_STALE_NS:
        do = "look at the host's log: it hangs, or its plugin gave up; guests are frozen"
        return wrong(subject, f"its process is silent for {beat_s:.0f} s", do)
    age_s = (now_ns - state.heartbeat_ns) / _NS
    if not state.idle and age_s > HOST_STALE_S:
        what = f"busy, and silent for {age_s:.0f} s"
        return wrong(subject, what, "look at the host's log: it hangs, or its plugin gave up")
    what = "idle" if state.idle else f"{state.running} running, {state.waiting} waiting"
    return ok(subject, f"{what}, last written {max(0.0, age_s):.1f} s ago")


def _grant(host: HostConfig) -> Finding:
    with _open(host) as page:
        grant = page.grant.read()
    age_s = (time.monotonic_ns() - grant.heartbeat_ns) / _NS if grant else float("inf")
    if grant is None or age_s > GRANT_STALE_S:
        do = "is it stopped? `kill -CONT` it or start the node again; its guest is frozen meanwhile"
        return wrong("grant heartbeat", f"the daemon is silent for {age_s:.1f} s", do)
    return ok("grant heartbeat", f"{grant.mode.name.lower()}, {grant.reason}")


def _clock(pid: int | None) -> Finding:
    if time.time() < os.path.getmtime(__file__) - 86_400:
        return wrong("clock", "the wall clock is wrong", "set it: manifests expire by it")
    if pid is None:
        return ok("clock", "plausible")
    theirs, ours = (_time_namespace(p) for p in (str(pid), "self"))
    if theirs is None:
        return note("clock", "the host's time namespace cannot be read", "run as the host's user")
    if theirs != ours:
        do = "share the host's time namespace: times on the page are CLOCK_MONOTONIC"
        return wrong("clock", "host and node count time differently", do)
    return ok("clock", "shared with the host")


def _time_namespace(pid: str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/time").readlink())
    except OSError:
        return None
