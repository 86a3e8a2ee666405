"""The host's side: its page, its process, its clock."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from executor import ControlPage, PageError
from executor.control_page import LAYOUT_VERSION
from rose.doctor.finding import Finding, checked, note, ok, wrong
from rose.node.engine_config import HostConfig

# Fifty grants a second are written; a host in a step writes at its end, which may take a while.
GRANT_STALE_S = 1.0
HOST_STALE_S = 30.0
_NS = 1e9


def host_checks(host: HostConfig, *, daemon_runs: bool) -> Iterator[Finding]:
    """Findings about one host."""
    yield checked("page", partial(_page, host.page))
    yield checked("host", partial(_alive, host.pid))
    if host.page.exists():
        yield checked("host heartbeat", partial(_heartbeat, host.page))
        if daemon_runs:
            yield checked("grant heartbeat", partial(_grant, host.page))
    yield checked("clock", partial(_clock, host.pid))


def _page(path: Path) -> Finding:
    if not path.exists():
        return note("page", f"none at {path}", "whoever starts first, host or node, makes it")
    try:
        with ControlPage.open(path) as page:
            return ok("page", f"{path}, layout {LAYOUT_VERSION}, made by process {page.owner_pid}")
    except PageError as error:
        what, _, do = str(error).partition("; ")
        return wrong("page", what, do or "delete it, then start host and node again")


def _alive(pid: int | None) -> Finding:
    if pid is None:
        return note("host", "no pid is given", "set host.pid, or a dead idle host is not noticed")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return wrong("host", f"process {pid} is gone", "start the host, write its pid to host.pid")
    except PermissionError:
        return wrong("host", f"process {pid} is another user's", "run the node as that user")
    return ok("host", f"process {pid} lives")


def _heartbeat(path: Path) -> Finding:
    subject = "host heartbeat"
    with ControlPage.open(path) as page:
        state = page.host.read()
    if state is None:
        do = "start it with --scheduler-cls executor.vllm.host.ObservedScheduler, ROSE_ROLE=host"
        return wrong(subject, "the host has never written to its page", do)
    age_s = (time.monotonic_ns() - state.heartbeat_ns) / _NS
    if not state.idle and age_s > HOST_STALE_S:
        what = f"busy, and silent for {age_s:.0f} s"
        return wrong(subject, what, "look at the host's log: it hangs, or its plugin gave up")
    what = "idle" if state.idle else f"{state.running} running, {state.waiting} waiting"
    return ok(subject, f"{what}, last written {max(0.0, age_s):.1f} s ago")


def _grant(path: Path) -> Finding:
    with ControlPage.open(path) as page:
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
