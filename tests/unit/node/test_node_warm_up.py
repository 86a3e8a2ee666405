"""A replica is offered once its engine is warm; until then its guest runs only to warm up."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_bench import Bench

from executor import GrantMode
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import PATIENCE_S


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, "guest")
    await bench.start()
    yield bench
    await bench.close()


async def test_a_cold_guest_is_not_offered_but_may_run_in_host_idle_time(bench: Bench) -> None:
    cold = bench.folder / "cold"
    cold.touch()
    bench.spawn()
    await bench.until("starts", lambda row: not row.healthy)
    while (grant := bench.page.grant.peek()) is None or grant.reason != "warm_up":
        await bench.until_noted("grant")
    assert (grant.mode, grant.slack_share) == (GrantMode.RUN, 0.0)
    row = await bench.row()
    assert row is not None
    assert not row.healthy
    assert bench.calls("admit") == []
    cold.unlink()
    await bench.until("leased", lambda row: row.healthy and row.leased)
    states = [event["state"] for event in bench.noted("engine_state")]
    assert states[-2:] == ["starting", "healthy"]


async def test_an_engine_that_does_not_become_warm_is_started_anew(bench: Bench) -> None:
    (bench.folder / "cold").touch()
    (bench.folder / "too_cold").touch()
    bench.spawn()
    failed = await bench.until_noted("engine_start_failed")
    assert "is not warm: 3 of 9 sizes" in failed["message"]
    assert "\n" not in failed["message"]
    (bench.folder / "cold").unlink()
    (bench.folder / "too_cold").unlink()
    await bench.until("leased", lambda row: row.healthy and row.leased)


async def test_the_kill_switch_ends_a_guest_that_warms_up(bench: Bench) -> None:
    (bench.folder / "cold").touch()
    bench.spawn()
    pid = (await bench.until_noted("engine_started"))["pid"]
    (bench.run_dir / "KILL").touch()
    async with asyncio.timeout(PATIENCE_S):
        while group_alive(pid):  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        while bench.noted("engine_state")[-1]["state"] != "stopped":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_guest_that_may_not_be_ends_in_the_middle_of_its_warm_up(bench: Bench) -> None:
    (bench.folder / "cold").touch()
    bench.spawn()
    await bench.until_noted("engine_started")
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    reclaimed = await bench.until_noted("engine_reclaimed")
    assert (reclaimed["reason"], len(bench.noted("engine_reclaimed"))) == ("harvest is off", 1)
