"""A guest that does nothing any more is ended whole, gets no turns, and another one comes."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_bench import Bench

from executor import GuestState
from rose.node.guest.supervisor import POLL_S
from rose.process.child import group_alive
from tests.harness.waiting import PATIENCE_S, until_async

LOOKS = 20


class Beats(threading.Thread):
    """Heartbeats of a guest's watchdog, which stop with the guest."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(daemon=True)
        self._page, self.ended = bench.page, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self._page.guest.write(GuestState(heartbeat_ns=time.monotonic_ns()))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, "guest", orphan_s=20.0)
    (tmp_path / "core").touch()
    await bench.start()
    yield bench
    await bench.close()


@pytest.fixture
async def beats(bench: Bench) -> AsyncIterator[Beats]:
    beats = Beats(bench)
    beats.start()
    bench.spawn()
    await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    yield beats
    beats.ended.set()
    beats.join()


async def test_a_stopped_guest_is_ended(bench: Bench, beats: Beats) -> None:
    (started,) = bench.calls("start")
    os.killpg(started["pid"], signal.SIGSTOP)
    beats.ended.set()
    assert "SIGSTOP" in (await bench.until_noted("engine_reclaimed"))["reason"]
    await until_async(lambda: not group_alive(started["pid"]), PATIENCE_S, "all of it is gone")


async def test_a_guest_without_its_core_gets_no_turns_and_another_one_comes(
    bench: Bench, beats: Beats
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
