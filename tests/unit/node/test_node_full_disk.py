"""A node whose log disk takes nothing, and one whose background tasks die."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_bench import NodeBench

from rose.node import NodeDaemon
from rose.node.guest.supervisor import Supervisor
from rose.node.scheduler_session import SchedulerSession
from rose.node.weight_updates import Updates
from rose.process import background_tasks

PATIENCE_S = 20.0
LOGS = ("events-n0.jsonl", "guest.jsonl", "host_latency.jsonl", "activations.jsonl")


def fill_disk(folder: Path) -> None:
    """No log of the node takes a byte."""
    folder.mkdir(exist_ok=True)
    for name in (*LOGS, "engine-r0.log"):
        (folder / name).symlink_to("/dev/full")


@pytest.mark.parametrize("bench", [{}], indirect=True)
async def test_a_guest_is_leased_granted_and_updated_on_a_full_disk(
    bench: NodeBench, tmp_path: Path
) -> None:
    fill_disk(tmp_path / "logs")
    daemon = bench.spawn()
    await bench.until("leased", lambda row: row.leased and row.healthy)
    await bench.publish(1)
    await bench.until("updated", lambda row: row.policy_version == 1)
    first = bench.page.grant.read().heartbeat_ns
    await asyncio.sleep(0.3)
    assert bench.page.grant.read().heartbeat_ns > first, "grants go on being written"
    assert daemon.poll() is None
    (dropped,) = await bench.scraped("rose_log_dropped_records_total ")
    daemon.terminate()
    assert await asyncio.to_thread(daemon.wait, PATIENCE_S) == 0
    assert float(dropped.split()[1]) > 0
    said = (tmp_path / "daemon.log").read_text()
    for name in LOGS[:2]:
        assert said.count(f"{name} cannot be written") == 1, "it is said once"


BENCH = {"kind": "dedicated"}
pytestmark = pytest.mark.usefixtures("standins")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_tasks, "FIRST_PAUSE_S", 0.001)


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
    cls: type, bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, "run", breaks(cls, "run", 6))
    async with bench.running():
        await bench.until("leased", lambda row: row.leased and row.healthy)
        await bench.publish(1)
        await bench.until("updated", lambda row: row.policy_version == 1)
        exposed = await bench.scraped("rose_task_")
    assert len(bench.noted("task_died")) == 6
    assert any(line.endswith(" 6.0") and "restarts_total" in line for line in exposed)
    assert all(line.endswith(" 1.0") for line in exposed if "running" in line)


async def test_a_supervisor_that_dies_ends_the_node_and_its_engine(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", breaks(Supervisor, "run", 1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(
            background_tasks.TaskDiedError, match=r"^r0: supervisor ended \(UnicodeError"
        ):
            await NodeDaemon(bench.config).run()


async def test_what_an_engine_prints_is_bounded(bench: NodeBench) -> None:
    bench.settings["logs"] = {"file_bytes": 1 << 20}
    logs = bench.folder / "logs"
    logs.mkdir()
    with (logs / "engine-r0.log").open("wb") as log:
        log.truncate(bench.config.logs.limits.file_bytes + 1)
    async with bench.running():
        await bench.until_noted("engine_log_trimmed")
    assert (logs / "engine-r0.log").stat().st_size < 1 << 20
    assert (logs / "engine-r0.log.1").exists()
