"""An engine that ends again and again is given up; one that was stopped as often is not."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose.engines.spec import EngineRole, EngineSpec
from rose.logs.eventlog import EventLog
from rose.node.guest import supervisor
from rose.node.guest.supervisor import MAX_SHORT_LIVES, EngineState, Supervisor
from tests.harness.waiting import PATIENCE_S


class StandInEngine:
    """Healthy at once; lives until `die`, or `process.kill`."""

    secret = ""
    lives: list["StandInEngine"]

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.process = SimpleNamespace(pid=0, wait=self._wait, kill=self._kill)

    @classmethod
    async def start(cls, *_: object) -> "StandInEngine":
        cls.lives.append(cls())
        return cls.lives[-1]

    async def wait_healthy(self, *_: object) -> None:
        pass

    async def stop(self) -> None:
        self._over.set()

    def die(self) -> None:
        self._over.set()

    async def _wait(self) -> int:
        await self._over.wait()
        return 1

    async def _kill(self) -> None:
        self._over.set()


class Bench:
    """A supervisor of stand-in engines; `forbidden` is what its rules say."""

    def __init__(self, folder: Path) -> None:
        self.forbidden: str | None = None
        self.events = EventLog(folder, "node")
        spec = EngineSpec("g0", EngineRole.GUEST, folder, 1, folder / "log")
        self.supervisor = Supervisor(spec, 1.0, self.events, self)

    async def entered(self, state: EngineState) -> None:
        pass

    def must_end(self) -> str | None:
        return self.forbidden

    def must_wait(self) -> str | None:
        return None

    def hangs(self) -> str | None:
        return None

    def check_room(self) -> None:
        pass

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def healthy(self) -> StandInEngine:
        await self.until(lambda: self.supervisor.state is EngineState.HEALTHY)
        return StandInEngine.lives[-1]

    async def dies(self) -> None:
        engine = await self.healthy()
        engine.die()
        await self.until(lambda: self.supervisor.state is not EngineState.HEALTHY)

    async def stopped_and_let_on(self) -> None:
        await self.healthy()
        self.forbidden = "stopped by the operator"
        await self.until(lambda: self.supervisor.state is EngineState.STOPPED)
        self.forbidden = None


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    StandInEngine.lives = []
    monkeypatch.setattr(supervisor, "EngineProcess", StandInEngine)
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.001)
    return Bench(tmp_path)


async def test_an_engine_that_dies_young_each_time_is_given_up(bench: Bench) -> None:
    running = asyncio.create_task(bench.supervisor.run())
    for _ in range(MAX_SHORT_LIVES):
        await bench.dies()
    await bench.until(lambda: bench.supervisor.state is EngineState.FAILED)
    assert len(StandInEngine.lives) == MAX_SHORT_LIVES
    await bench.supervisor.stop()
    await running


async def test_an_engine_that_lacks_descriptors_is_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = StandInEngine.start

    async def full(*_: object) -> StandInEngine:
        monkeypatch.setattr(StandInEngine, "start", start)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(StandInEngine, "start", full)
    running = asyncio.create_task(bench.supervisor.run())
    await bench.healthy()
    assert bench.supervisor.restarts == 1
    assert "Too many open files" in caplog.text, "whoever watches the daemon sees it too"
    await bench.supervisor.stop()
    await running


async def test_an_engine_that_was_stopped_each_time_is_started_again_after_a_crash(
    bench: Bench,
) -> None:
    running = asyncio.create_task(bench.supervisor.run())
    for _ in range(MAX_SHORT_LIVES):
        await bench.stopped_and_let_on()
    await bench.dies()
    await bench.healthy()
    await bench.supervisor.stop()
    await running
