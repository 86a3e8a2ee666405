"""A scheduler whose log disk takes nothing: it leases, revokes and answers as before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.main.scheduler import SchedulerSettings, serve
from rose.process.background_tasks import TaskDiedError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.scheduler import SchedulerService
from rose.store import StoreName
from tests.harness.waiting import PATIENCE_S
from tests.unit.scheduler.test_scheduler_service import FakeNode


class Serving:
    """A whole scheduler in this loop, its event log on a disk that is full."""

    def __init__(self, folder: Path) -> None:
        logs = folder / "log"
        logs.mkdir()
        (logs / "events-scheduler.jsonl").symlink_to("/dev/full")
        port = free_port()
        settings = SchedulerSettings(
            "127.0.0.1", port, StoreName(str(folder / "s.sqlite")), logs, HarvestMode.ACTIVE, 0.05
        )
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(serve(settings, self.stop))
        self.channel = make_channel(f"127.0.0.1:{port}")
        self.stub = SchedulerStub(self.channel)

    async def snapshot(self) -> pb.SnapshotReply:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert not self.task.done(), self.task.exception()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return await self.stub.Snapshot(pb.SnapshotRequest(), timeout=1)
                await asyncio.sleep(0.02)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    serving = Serving(tmp_path)
    yield serving
    serving.stop.set()
    await asyncio.gather(serving.task, return_exceptions=True)
    await serving.channel.close()


async def test_leases_are_granted_and_revoked_though_no_event_can_be_written(
    serving: Serving,
) -> None:
    await serving.snapshot()
    await serving.stub.RegisterJob(pb.RegisterJobRequest(job="j", max_staleness=0))
    node = FakeNode(serving.stub)
    await node.hears("harvest")
    node.offer()
    assert (await node.hears("lease")).lease.epoch == 1
    revoked = await serving.stub.Revoke(pb.RevokeRequest(replica="g0", reason="operator"))
    assert revoked.epoch == 1
    assert (await node.hears("release")).release.epoch == 1
    late = FakeNode(serving.stub, "late")
    await late.hears("harvest")
    await late.leave()
    await node.leave()
    async with asyncio.timeout(PATIENCE_S):
        while not (troubles := list((await serving.snapshot()).troubles)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert troubles == ["log events-scheduler.jsonl: No space left on device"]
    serving.stop.set()
    await serving.task


async def test_ticks_that_end_again_and_again_end_the_process_with_a_line(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.process.background_tasks.FIRST_PAUSE_S", 0.001)

    async def breaks(self: SchedulerService) -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(SchedulerService, "tick", breaks)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(TaskDiedError, match=r"^tick ended \(ValueError: .*start the process"):
            await serving.task
