"""A real scheduler over real gRPC in this process, and a node that offers one stand-in replica."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from elastic_scheduler import HarvestMode
from rose.gateway import Gateway, GatewaySettings
from rose.logs.eventlog import EventLog
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel, make_server
from rose.rpc.rose_pb2_grpc import (
    SchedulerServicer,
    SchedulerStub,
    add_SchedulerServicer_to_server,
)
from rose.scheduler import LeaseTimes, SchedulerCore, SchedulerService
from rose.scheduler.persistence import load
from tests.fakes.memory_store import InMemoryStore
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S
from tests.unit.gateway.gateway_cases import base_url

GUEST, JOB = "guest-0", "grpo"


class RunningScheduler:
    """One life of a scheduler; the next one gets its store and its port."""

    def __init__(self, folder: Path, store: InMemoryStore | None = None, port: int = 0) -> None:
        self.store = store = store or InMemoryStore()
        self._events = EventLog(folder, "scheduler")
        times = LeaseTimes(cooldown_s=0.05)
        self.core = SchedulerCore(load(store.entries), HarvestMode.ACTIVE, times)
        self.service = SchedulerService(self.core, store, self._events)
        self._server = make_server()
        add_SchedulerServicer_to_server(self.service, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    async def __aenter__(self) -> "RunningScheduler":
        await self._server.start()
        self._ticking = asyncio.create_task(self.service.tick())
        self._channel = make_channel(f"127.0.0.1:{self.port}")
        self.stub = SchedulerStub(self._channel)
        await self.stub.RegisterJob(pb.RegisterJobRequest(job=JOB))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._ticking.cancel()
        self.service.close()
        await self._channel.close()
        await self._server.stop(0.1)
        self._events.close()

    async def job(self) -> pb.JobView:
        return (await self.snapshot()).jobs[0]

    async def snapshot(self) -> pb.SnapshotReply:
        return await self.stub.Snapshot(pb.SnapshotRequest())

    async def until_job(self, **wanted: object) -> None:
        """Until its job looks like that."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                job = await self.job()
                if all(getattr(job, name) == value for name, value in wanted.items()):
                    return
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway_of(
    scheduler: RunningScheduler,
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway that watches this scheduler, and a session with it."""
    settings = GatewaySettings(port=0, scheduler=f"127.0.0.1:{scheduler.port}", shutdown_s=0.1)
    async with (
        Gateway(settings) as gateway,
        aiohttp.ClientSession(base_url(gateway)) as session,
    ):
        yield gateway, session


@contextlib.asynccontextmanager
async def watching(
    folder: Path,
) -> AsyncIterator[tuple[RunningScheduler, Gateway, aiohttp.ClientSession]]:
    """A scheduler that knows a gateway's demand, the gateway, and a session with it."""
    async with (
        RunningScheduler(folder) as scheduler,
        gateway_of(scheduler) as (gateway, session),
    ):
        await scheduler.until_job(demand_known=True, turns=0)
        yield scheduler, gateway, session


@contextlib.asynccontextmanager
async def offering(scheduler: RunningScheduler, replica: StandInReplica) -> AsyncIterator[None]:
    """A node that offers the replica as a guest, ten times a second."""
    offer = pb.Offer(
        replica=GUEST, kind=1, url=replica.url, ttl_s=3.0, healthy=True, max_sequences=8
    )

    async def reports() -> AsyncIterator[pb.NodeReport]:
        yield pb.NodeReport(node="n0", hello=pb.Hello(protocol=2))
        while True:
            yield pb.NodeReport(node="n0", offers=pb.Offers(offers=[offer]))
            await asyncio.sleep(0.1)

    async def follow() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for command in scheduler.stub.Attach(reports()):
                if command.HasField("lease"):
                    offer.epoch = command.lease.epoch

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---- a scheduler of tables alone ----


def row(name: str = "guest-0", epoch: int = 3, **fields: Any) -> pb.Replica:
    guest = {
        "kind": pb.REPLICA_KIND_GUEST,
        "url": "http://127.0.0.1:1",
        "leased": True,
        "policy_version": 2,
        "max_sequences": 8,
        "healthy": True,
    }
    return pb.Replica(id=name, lease_epoch=epoch, **(guest | fields))


TABLE = pb.ReplicaTable(revision=1, replicas=[row()])


class FakeScheduler(SchedulerServicer):
    """Sends its tables on each watch, again and again if `every_s` is given, then is silent."""

    def __init__(self, *tables: pb.ReplicaTable, every_s: float | None = None) -> None:
        self.tables = tables or (TABLE,)
        self.every_s = every_s
        self.watches = 0

    async def WatchReplicas(self, request: Any, context: Any) -> AsyncIterator[pb.ReplicaTable]:
        self.watches += 1
        while True:
            for table in self.tables:
                yield table
            await asyncio.sleep(60 if self.every_s is None else self.every_s)
