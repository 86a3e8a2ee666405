"""A node whose log disk takes nothing, and one whose background tasks die."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from node_bench import Bench, standin_spec

from executor import ControlPage, GrantController, GuardConfig, HostState
from rose.engines import launch
from rose.logs.eventlog import EventLog, JsonlLog
from rose.logs.rotating_jsonl import LogThread
from rose.node import NodeDaemon
from rose.node.guest import supervisor
from rose.node.guest.guard import GuardedHost, GuardThread
from rose.node.guest.kill_switch import KillSwitch
from rose.node.guest.supervisor import Supervisor
from rose.node.host import HostWatch
from rose.node.scheduler_session import SchedulerSession
from rose.node.weight_updates import Updates
from rose.process import background_tasks
from tests.fakes.guarded_guest import LeasedGuest

PATIENCE_S = 20.0
LOGS = ("events-n0.jsonl", "guest.jsonl", "host_latency.jsonl", "activations.jsonl")


def fill_disk(folder: Path) -> None:
    """No log of the node takes a byte."""
    folder.mkdir(exist_ok=True)
    for name in (*LOGS, "engine-r0.log"):
        (folder / name).symlink_to("/dev/full")


async def test_a_guest_is_leased_granted_and_updated_on_a_full_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "guest")
    fill_disk(tmp_path / "logs")
    await bench.start()
    try:
        daemon = bench.spawn()
        await bench.until("leased", lambda row: row.leased and row.healthy)
        await bench.publish(1)
        await bench.until("updated", lambda row: row.policy_version == 1)
        first = bench.page.grant.read().heartbeat_ns
        await asyncio.sleep(0.3)
        assert bench.page.grant.read().heartbeat_ns > first, "grants go on being written"
        assert daemon.poll() is None
        exposed = await scraped(bench)
        daemon.terminate()
        assert await asyncio.to_thread(daemon.wait, PATIENCE_S) == 0
    finally:
        await bench.close()
    dropped = next(line for line in exposed if line.startswith("rose_log_dropped_records_total"))
    assert float(dropped.split()[1]) > 0
    said = (tmp_path / "daemon.log").read_text()
    for name in LOGS[:2]:
        assert said.count(f"{name} cannot be written") == 1, "it is said once"


async def scraped(bench: Bench) -> list[str]:
    url = f"http://127.0.0.1:{bench.settings['metrics_port']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.text()).splitlines()


def guard_of(
    folder: Path,
    thread: LogThread | None = None,
    guest: LeasedGuest | None = None,
    samples: JsonlLog | None = None,
) -> GuardThread:
    """A guard with a host that is idle and a lease that lasts."""
    page = ControlPage.create(folder / "page")
    page.host.write(HostState(heartbeat_ns=time.monotonic_ns()))
    watch = HostWatch(JsonlLog(folder / "host_latency.jsonl", thread=thread))
    return GuardThread(
        guest or LeasedGuest("g0"),
        GuardedHost(page, watch, os.getpid()),
        GrantController(GuardConfig(64, 8)),
        KillSwitch(folder / "KILL"),
        samples or JsonlLog(folder / "guest.jsonl", thread=thread),
        EventLog(folder, "n0", thread=thread),
    )


def test_a_disk_that_hangs_delays_no_grant(tmp_path: Path) -> None:
    """Whatever the guard writes waits in a queue; what has no room there is dropped."""
    hangs, thread = threading.Event(), LogThread("test", waiting=4)
    thread.put(lambda: hangs.wait(60))
    samples = JsonlLog(tmp_path / "guest.jsonl", thread=thread)
    guard = guard_of(tmp_path, thread, samples=samples)
    guard.start()
    try:
        until_s = time.monotonic() + PATIENCE_S
        while samples.dropped < 7 and time.monotonic() < until_s:
            time.sleep(0.02)
        assert samples.dropped >= 7
        assert guard.granted > 25, "five grants for each sample, all through the outage"
    finally:
        guard.stop()
        hangs.set()
        thread.close(PATIENCE_S)


def test_a_guard_that_breaks_says_why(tmp_path: Path) -> None:
    def breaks() -> int:
        raise KeyError("a fault of the program")

    broken = threading.Event()
    guard = guard_of(tmp_path, guest=LeasedGuest("g0", breaks, on_broken=broken.set))
    guard.start()
    assert broken.wait(PATIENCE_S)
    guard.stop()
    assert guard.broke.startswith("KeyError: 'a fault of the program', test_node_full_disk.py:")
    assert '"event":"guard_broke"' in (tmp_path / "events-n0.jsonl").read_text()


def test_a_guard_without_descriptors_goes_on_once_it_has_some(tmp_path: Path) -> None:
    looks = iter([1, OSError(errno.EMFILE, "Too many open files")])
    again = threading.Event()

    def lease_epoch() -> int:
        if isinstance(look := next(looks, None), OSError):
            raise look
        if look is None:
            again.set()
        return 1

    broken = threading.Event()
    guard = guard_of(tmp_path, guest=LeasedGuest("g0", lease_epoch, on_broken=broken.set))
    guard.start()
    assert again.wait(PATIENCE_S)
    guard.stop()
    assert not broken.is_set()
    assert '"event":"guard_held_up"' in (tmp_path / "events-n0.jsonl").read_text()


class InProcess(Bench):
    """The node runs in this loop."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "dedicated")
        self.settings["logs"] = {"file_bytes": 1 << 20}
        self.node = NodeDaemon(self.config)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcess]:
    bench = InProcess(tmp_path)
    monkeypatch.setattr(launch, "process_spec", standin_spec(bench.journal))
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(background_tasks, "FIRST_PAUSE_S", 0.001)
    await bench.start()
    yield bench
    await bench.close()


def breaks(cls: type, name: str, times: int) -> Callable[[Any], Any]:
    """The method `name` of a class, which raises so often before it does what it should."""
    whole, left = getattr(cls, name), [None] * times

    async def run(self: Any) -> None:
        if left:
            left.pop()
            raise UnicodeError("a fault of the program")
        await whole(self)

    return run


@pytest.mark.parametrize("cls", [Updates, SchedulerSession])
async def test_a_task_that_dies_is_started_again_and_the_node_goes_on(
    cls: type, bench: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, "run", breaks(cls, "run", 6))
    running = asyncio.create_task(bench.node.run())
    await bench.until("leased", lambda row: row.leased and row.healthy)
    await bench.publish(1)
    await bench.until("updated", lambda row: row.policy_version == 1)
    assert not running.done()
    exposed = [line for line in await scraped(bench) if line.startswith("rose_task_")]
    bench.node.stop()
    await running
    assert len(bench.noted("task_died")) == 6
    assert any(line.endswith(" 6.0") and "restarts_total" in line for line in exposed)
    assert all(line.endswith(" 1.0") for line in exposed if "running" in line)


async def test_a_supervisor_that_dies_ends_the_node_and_its_engine(
    bench: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", breaks(Supervisor, "run", 1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(
            background_tasks.TaskDiedError, match=r"^r0: supervisor ended \(UnicodeError"
        ):
            await bench.node.run()


async def test_what_an_engine_prints_is_bounded(bench: InProcess) -> None:
    logs = bench.folder / "logs"
    with (logs / "engine-r0.log").open("wb") as log:
        log.truncate(bench.config.logs.limits.file_bytes + 1)
    running = asyncio.create_task(bench.node.run())
    await bench.until_noted("engine_log_trimmed")
    bench.node.stop()
    await running
    assert (logs / "engine-r0.log").stat().st_size < 1 << 20
    assert (logs / "engine-r0.log.1").exists()
