"""A guest on a GPU: its start runs on its host's card, so it begins while the host is idle."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_bench import Bench

from executor import GuestState
from executor.freeze_reason import FreezeReason
from rose.node.replica import HOST_BUSY
from tests.harness.waiting import PATIENCE_S


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, "guest", device=0)
    (tmp_path / "gpu").touch()
    await bench.start()
    yield bench
    await bench.close()


def busy(bench: Bench, running: int) -> None:
    bench.host.tell(running=running)


async def test_it_is_not_started_beside_a_busy_host(bench: Bench) -> None:
    busy(bench, 3)
    bench.spawn()
    await bench.until("known", lambda row: not row.healthy)
    await asyncio.sleep(0.6)
    assert bench.noted("engine_started") == []
    assert [event["reason"] for event in bench.noted("engine_waits")][-1:] == [HOST_BUSY]
    assert len(bench.noted("engine_waits")) <= 2, "said once, not with every look"
    assert [event["state"] for event in bench.noted("engine_state")] == ["stopped"]
    busy(bench, 0)
    await bench.until("leased", lambda row: row.healthy and row.leased)
    assert len(bench.noted("engine_started")) == 1


async def test_one_that_runs_stays_when_the_host_becomes_busy(bench: Bench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    busy(bench, 3)
    await asyncio.sleep(0.6)
    row = await bench.row()
    assert row is not None
    assert row.healthy
    assert len(bench.noted("engine_started")) == 1


async def test_a_start_does_not_run_out_of_time_while_its_host_leaves_it_none(
    bench: Bench,
) -> None:
    bench.settings["replicas"][0]["start_timeout_s"] = 0.5
    (bench.folder / "mute").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    busy(bench, 3)
    await asyncio.sleep(1.5)
    assert bench.noted("engine_start_failed") == []
    busy(bench, 0)
    failed = await bench.until_noted("engine_start_failed")
    assert "did not answer within" in failed["message"]


async def test_a_card_without_room_is_said_and_nothing_starts(bench: Bench) -> None:
    bench.settings["replicas"][0]["kv_bytes"] = 1 << 40
    bench.spawn()
    failed = await bench.until_noted("engine_start_failed")
    assert "need 1027.0 GiB of Stand-in GPU and 139.5 GiB are free beyond" in failed["message"]
    assert bench.noted("engine_started") == []


async def test_a_guest_that_starts_has_a_grant_to_do_so_in_host_idle_time(bench: Bench) -> None:
    (bench.folder / "mute").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    async with asyncio.timeout(PATIENCE_S):
        while (grant := bench.page.grant.peek()) is None or grant.reason != FreezeReason.WARM_UP:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert grant.slack_share == 0.0


async def test_what_a_guest_holds_is_asked_of_its_driver(bench: Bench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    port = bench.settings["metrics_port"]
    bench.page.guest.write(GuestState(bytes_mapped=1 << 30, heartbeat_ns=time.monotonic_ns()))
    await asyncio.sleep(0.2)

    def scrape() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return [line for line in answer.read().decode().splitlines() if "memory_bytes{" in line]

    (line,) = await asyncio.to_thread(scrape)
    # The stand-in's list does not have the engine, so what it says itself is all there is.
    assert "measured_by=\"the guest's page" in line
    assert float(line.split()[-1]) == 1 << 30
