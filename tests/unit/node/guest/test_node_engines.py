"""An engine's lives: given up, ended when it hangs or is exposed, offered once it is warm."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from node_bench import NodeBench

from executor import Grant, GrantMode, GuestState
from executor.freeze_reason import FreezeReason
from rose.engines.spec import EngineRole, EngineSpec
from rose.logs.eventlog import EventLog
from rose.node.guest import supervisor
from rose.node.guest.supervisor import (
    MAX_SHORT_LIVES,
    POLL_S,
    SILENT_S,
    STUCK_S,
    EngineState,
    HangWatch,
    Supervisor,
)
from rose.node.replica import HOST_BUSY
from rose.process.child import group_alive
from rose.process.procfs import ProcessIdentity, group_states
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import PATIENCE_S, until_async

# ---- one that ends again and again ----


class MortalEngine:
    """Healthy at once; lives until it is stopped or killed."""

    secret = ""
    lives: list["MortalEngine"]

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.process = SimpleNamespace(pid=0, wait=self._wait, kill=self.stop)

    @classmethod
    async def start(cls, *_: object) -> "MortalEngine":
        cls.lives.append(cls())
        return cls.lives[-1]

    async def wait_healthy(self, *_: object) -> None:
        pass

    async def stop(self) -> None:
        self._over.set()

    async def _wait(self) -> int:
        await self._over.wait()
        return 1


class Lives:
    """A supervisor of stand-in engines; `forbidden` is what its rules say."""

    def __init__(self, folder: Path) -> None:
        self.forbidden: str | None = None
        spec = EngineSpec("g0", EngineRole.GUEST, folder, 1, folder / "log")
        self.supervisor = Supervisor(spec, 1.0, EventLog(folder, "node"), self)

    async def entered(self, state: EngineState) -> None:
        pass

    def must_end(self) -> str | None:
        return self.forbidden

    def must_wait(self) -> str | None:
        return None

    hangs = must_wait

    def check_room(self) -> None:
        pass

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.supervisor.run())
        yield
        await self.supervisor.stop()
        await running

    async def until(self, state: EngineState) -> None:
        await until_async(lambda: self.supervisor.state is state, PATIENCE_S, state)

    async def dies(self) -> None:
        await self.until(EngineState.HEALTHY)
        engine = MortalEngine.lives[-1]
        await engine.stop()
        await until_async(
            lambda: (
                self.supervisor.state is not EngineState.HEALTHY
                or MortalEngine.lives[-1] is not engine
            ),
            PATIENCE_S,
            "it is dead",
        )

    async def stopped_and_let_on(self) -> None:
        await self.until(EngineState.HEALTHY)
        self.forbidden = "stopped by the operator"
        await self.until(EngineState.STOPPED)
        self.forbidden = None


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    MortalEngine.lives = []
    monkeypatch.setattr(supervisor, "EngineProcess", MortalEngine)
    for name in ("POLL_S", "FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(supervisor, name, 0.001)
    return Lives(tmp_path)


async def test_an_engine_that_dies_young_each_time_is_given_up(lives: Lives) -> None:
    async with lives.running():
        for _ in range(MAX_SHORT_LIVES):
            await lives.dies()
        await lives.until(EngineState.FAILED)
        assert len(MortalEngine.lives) == MAX_SHORT_LIVES


async def test_an_engine_that_lacks_descriptors_is_started_again(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = MortalEngine.start

    async def full(*_: object) -> MortalEngine:
        monkeypatch.setattr(MortalEngine, "start", start)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(MortalEngine, "start", full)
    async with lives.running():
        await lives.until(EngineState.HEALTHY)
    assert lives.supervisor.restarts == 1
    assert "Too many open files" in caplog.text, "whoever watches the daemon sees it too"


async def test_an_engine_that_was_stopped_each_time_is_started_again_after_a_crash(
    lives: Lives,
) -> None:
    async with lives.running():
        for _ in range(MAX_SHORT_LIVES):
            await lives.stopped_and_let_on()
        await lives.dies()
        await lives.until(EngineState.HEALTHY)


# ---- one that stands still ----


@pytest.fixture
def group(process: "subprocess.Popen[bytes]") -> int:
    return process.pid


def silent_for(seconds: float) -> GuestState:
    return GuestState(heartbeat_ns=time.monotonic_ns() - round(seconds * 1e9))


def judged(guest: GuestState | None, group: int | None) -> str | None:
    return HangWatch().reason(guest, group)


@pytest.mark.parametrize(
    ("silent_s", "ended"), [(0.1, False), (SILENT_S + 5, False), (STUCK_S + 1, True)]
)
def test_a_guest_is_ended_once_it_is_silent_beyond_what_load_explains(
    group: int, silent_s: float, ended: bool
) -> None:
    assert ("no sign of life" in (judged(silent_for(silent_s), group) or "")) is ended


def test_without_a_page_or_a_process_no_guest_is_ended(group: int) -> None:
    assert judged(None, group) is None
    assert judged(silent_for(STUCK_S + 1), None) is None


def test_a_stopped_guest_is_ended_once_it_is_silent(group: int) -> None:
    os.killpg(group, signal.SIGSTOP)
    while "T" not in group_states(group):
        time.sleep(0.01)
    assert judged(silent_for(0.1), group) is None
    assert "SIGSTOP" in (judged(silent_for(SILENT_S + 0.1), group) or "")


RENAMED = """
import os, sys, time
if os.fork() == 0:
    open("/proc/self/comm", "w").write(sys.argv[1])
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("VLLM::EngineCore", "engine core"),
        ("VLLM::Worker_TP1", "rank"),
        ("sglang::scheduler_TP1", "rank"),
    ],
)
def test_a_guest_whose_engine_core_or_rank_died_is_ended_at_once(name: str, part: str) -> None:
    """Dead engine keeps receiving traffic: its API process answers on for seconds."""
    argv = [sys.executable, "-S", "-c", RENAMED, name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout
        core = int(process.stdout.readline())
        watch = HangWatch()
        assert watch.reason(silent_for(0.1), process.pid) is None
        assert watch.reason(silent_for(0.1), process.pid) is None
        os.kill(core, signal.SIGKILL)
        while ProcessIdentity.of(core):
            time.sleep(0.01)
        assert watch.reason(silent_for(0.1), process.pid) == f"its {part} is dead"
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


LOOKS = 12


stoppable = pytest.mark.parametrize("bench", [{"orphan_s": 20.0, "files": ["core"]}], indirect=True)


@pytest.fixture
async def beats(bench: NodeBench) -> AsyncIterator["asyncio.Task[None]"]:
    """Heartbeats of the watchdog of a leased guest, until the task is cancelled."""

    async def beat() -> None:
        while True:
            bench.page.guest.write(GuestState(heartbeat_ns=time.monotonic_ns()))
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(beat())
    bench.spawn()
    await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    yield beating
    beating.cancel()


@stoppable
async def test_a_stopped_guest_is_ended(bench: NodeBench, beats: "asyncio.Task[None]") -> None:
    (started,) = bench.calls("start")
    os.killpg(started["pid"], signal.SIGSTOP)
    beats.cancel()
    assert "SIGSTOP" in (await bench.until_noted("engine_reclaimed"))["reason"]
    await until_async(lambda: not group_alive(started["pid"]), PATIENCE_S, "all of it is gone")


@stoppable
async def test_a_guest_without_its_core_gets_no_turns_and_another_one_comes(
    bench: NodeBench, beats: "asyncio.Task[None]"
) -> None:
    before = await bench.until("leased", lambda row: row.leased)
    (core,) = bench.calls("core")
    # A core that was never seen is not missed, and nothing tells that it was seen.
    await asyncio.sleep(LOOKS * POLL_S)
    os.kill(core["core"], signal.SIGKILL)
    assert (await bench.until_noted("engine_reclaimed"))["reason"] == "its engine core is dead"
    await until_async(lambda: not group_alive(core["pid"]), PATIENCE_S, "the rest of it is gone")
    await bench.until(
        "leased anew", lambda row: row.leased and row.lease_epoch > before.lease_epoch
    )
    first, second = bench.calls("start")
    assert first["pid"] == core["pid"] != second["pid"]


# ---- warm-up ----


async def warming(bench: NodeBench) -> Grant:
    """Return the guest's grant for its warm-up."""
    return await bench.until_granted(
        "a grant to warm up", lambda grant: grant.reason == FreezeReason.WARM_UP
    )


async def test_a_cold_guest_is_not_offered_but_may_run_in_host_idle_time(bench: NodeBench) -> None:
    cold = bench.folder / "cold"
    cold.touch()
    bench.spawn()
    await bench.until("starts", lambda row: not row.healthy)
    grant = await warming(bench)
    assert (grant.mode, grant.slack_share) == (GrantMode.RUN, 0.0)
    row = await bench.row()
    assert row is not None
    assert not row.healthy
    assert bench.calls("admit") == []
    cold.unlink()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    states = [event["state"] for event in bench.noted("engine_state")]
    assert states[-2:] == ["starting", "healthy"]


async def test_an_engine_that_does_not_become_warm_is_started_anew(bench: NodeBench) -> None:
    (bench.folder / "cold").touch()
    (bench.folder / "too_cold").touch()
    bench.spawn()
    failed = await bench.until_noted("engine_start_failed")
    assert "is not warm: 3 of 9 sizes" in failed["message"]
    assert "\n" not in failed["message"]
    (bench.folder / "cold").unlink()
    (bench.folder / "too_cold").unlink()
    await bench.until("leased", lambda row: row.healthy and row.leased)


async def test_the_kill_switch_ends_a_guest_that_warms_up(bench: NodeBench) -> None:
    (bench.folder / "cold").touch()
    bench.spawn()
    pid = (await bench.until_noted("engine_started"))["pid"]
    (bench.run_dir / "KILL").touch()
    await until_async(lambda: not group_alive(pid), PATIENCE_S, "the guest is gone")
    await until_async(
        lambda: bench.noted("engine_state")[-1]["state"] == "stopped", PATIENCE_S, "it is stopped"
    )


async def test_a_guest_that_may_not_be_ends_in_the_middle_of_its_warm_up(bench: NodeBench) -> None:
    (bench.folder / "cold").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    reclaimed = await bench.until_noted("engine_reclaimed")
    assert (reclaimed["reason"], len(bench.noted("engine_reclaimed"))) == ("harvest is off", 1)


@pytest.mark.parametrize("bench", [{"kind": "dedicated", "files": ["open"]}], indirect=True)
async def test_an_engine_that_other_machines_reach_is_never_offered(bench: NodeBench) -> None:
    bench.spawn()
    ended = await bench.until_noted("engine_reclaimed")
    assert ended["reason"] == "it listens at 0.0.0.0 and not on loopback alone"
    assert bench.calls("admit") == []
    (bench.folder / "open").unlink()
    await bench.until("leased", lambda row: row.healthy and row.leased)


# ---- a guest on a GPU, whose start runs on its host's card ----


on_a_gpu = pytest.mark.parametrize("bench", [{"device": 0, "files": ["gpu"]}], indirect=True)


@on_a_gpu
async def test_it_is_not_started_beside_a_busy_host(bench: NodeBench) -> None:
    bench.host.tell(running=3)
    bench.spawn()
    await bench.until("known", lambda row: not row.healthy)
    await asyncio.sleep(0.6)
    assert bench.noted("engine_started") == []
    assert [event["reason"] for event in bench.noted("engine_waits")][-1:] == [HOST_BUSY]
    assert len(bench.noted("engine_waits")) <= 2, "said once, not with every look"
    assert [event["state"] for event in bench.noted("engine_state")] == ["stopped"]
    bench.host.tell(running=0)
    await bench.until("leased", lambda row: row.healthy and row.leased)
    assert len(bench.noted("engine_started")) == 1


@on_a_gpu
async def test_one_that_runs_stays_when_the_host_becomes_busy(bench: NodeBench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    bench.host.tell(running=3)
    await asyncio.sleep(0.6)
    row = await bench.row()
    assert row is not None
    assert row.healthy
    assert len(bench.noted("engine_started")) == 1


@on_a_gpu
async def test_a_start_does_not_run_out_of_time_while_its_host_leaves_it_none(
    bench: NodeBench,
) -> None:
    bench.settings["replicas"][0]["start_timeout_s"] = 0.4
    (bench.folder / "mute").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    bench.host.tell(running=3)
    await asyncio.sleep(0.8)
    assert bench.noted("engine_start_failed") == []
    bench.host.tell(running=0)
    failed = await bench.until_noted("engine_start_failed")
    assert "did not answer within" in failed["message"]


@on_a_gpu
async def test_a_card_without_room_is_said_and_nothing_starts(bench: NodeBench) -> None:
    bench.settings["replicas"][0]["kv_bytes"] = 1 << 40
    bench.spawn()
    failed = await bench.until_noted("engine_start_failed")
    assert (
        "need 1027.0 GiB of Stand-in GPU (GPU 0) and 139.5 GiB are free beyond" in failed["message"]
    )
    assert bench.noted("engine_started") == []


@on_a_gpu
async def test_a_guest_that_starts_has_a_grant_to_do_so_in_host_idle_time(bench: NodeBench) -> None:
    (bench.folder / "mute").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    assert (await warming(bench)).slack_share == 0.0


@on_a_gpu
async def test_what_a_guest_holds_is_asked_of_its_driver(bench: NodeBench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    bench.page.guest.write(GuestState(bytes_mapped=1 << 30, heartbeat_ns=time.monotonic_ns()))
    await asyncio.sleep(0.2)
    (line,) = await bench.scraped("memory_bytes{")
    # The stand-in's list does not have the engine, so what it says itself is all there is.
    assert "measured_by=\"the guest's page" in line
    assert float(line.split()[-1]) == 1 << 30
