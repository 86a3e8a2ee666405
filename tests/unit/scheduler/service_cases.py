"""A scheduler over real gRPC in this process, and a node that is not one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from elastic_scheduler import HarvestMode
from rose.logs.eventlog import EventLog
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel, make_server
from rose.rpc.rose_pb2_grpc import SchedulerStub, add_SchedulerServicer_to_server
from rose.scheduler import LeaseTimes, SchedulerCore, SchedulerService
from rose.scheduler.persistence import Saved, load
from rose.scheduler.service import ServiceTimes
from rose.security.certificates import CertificateFiles
from rose.security.rpc_access import AccessInterceptor
from rose.store import Store
from tests.fakes.memory_store import InMemoryStore
from tests.harness.waiting import PATIENCE_S


class FakeNode:
    """Offers one guest and remembers what it is told. obeys: it says when a mode holds."""

    def __init__(
        self,
        stub: SchedulerStub,
        node: str = "n0",
        *,
        obeys: bool = False,
        release: str = "",
    ) -> None:
        self._reports: asyncio.Queue[pb.NodeReport | None] = asyncio.Queue()
        self.node = node
        self.told: asyncio.Queue[pb.NodeCommand] = asyncio.Queue()
        hello = pb.Hello(protocol=2, obeys=obeys, release=release)
        self.say(hello=hello)
        self.call = stub.Attach(self._outgoing())
        self._listener = asyncio.create_task(self._listen())

    def say(self, **report: object) -> None:
        self._reports.put_nowait(pb.NodeReport(node=self.node, **report))  # type: ignore[arg-type]

    def offer(self, **changes: object) -> None:
        fields = {"replica": "g0", "kind": 1, "url": "http://g0", "ttl_s": 3.0, "healthy": True}
        self.say(offers=pb.Offers(offers=[pb.Offer(**{**fields, **changes})]))  # type: ignore[arg-type]

    async def hears(self, kind: str | None) -> pb.NodeCommand:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                command = await self.told.get()
                if command.WhichOneof("command") == kind:
                    return command

    async def leave(self) -> None:
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener

    async def _outgoing(self) -> AsyncIterator[pb.NodeReport]:
        while (report := await self._reports.get()) is not None:
            yield report

    async def _listen(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for command in self.call:
                if command.harvest.order:
                    self.say(obeyed=pb.Obeyed(order=command.harvest.order))
                self.told.put_nowait(command)


class Bench:
    def __init__(
        self,
        store: Store,
        folder: Path,
        answer_s: float = 5.0,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self.store = store
        self.events = EventLog(folder, "scheduler")
        self.log = folder / "events-scheduler.jsonl"
        self.ticking: asyncio.Task[None]
        saved = load(store.entries) if isinstance(store, InMemoryStore) else Saved()
        self.core = SchedulerCore(saved, HarvestMode.ACTIVE, LeaseTimes(cooldown_s=0.05))
        self.audited: list[tuple[str, dict[str, object], str]] = []
        self.service = SchedulerService(
            self.core,
            store,
            self.events,
            audit=lambda *record: self.audited.append(record),
            times=ServiceTimes(answer_s=answer_s),
        )
        access = None
        if certificates:
            access = AccessInterceptor(certificates.identity.cluster, self.service.refused)
        self.server = make_server(access)
        add_SchedulerServicer_to_server(self.service, self.server)
        if certificates:
            credentials = certificates.server_credentials()
            port = self.server.add_secure_port("127.0.0.1:0", credentials)
        else:
            port = self.server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        self.channel = make_channel(self.address)
        self.stub = SchedulerStub(self.channel)


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    """Serve, and leave nothing behind."""
    await bench.server.start()
    bench.ticking = asyncio.create_task(bench.service.tick())
    try:
        yield bench
    finally:
        bench.ticking.cancel()
        bench.service.close()
        await bench.channel.close()
        await bench.server.stop(0)
        bench.events.close()


async def shows(bench: Bench, wanted: Callable[[pb.SnapshotReply], bool]) -> None:
    """Until a snapshot is like that."""
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(await bench.stub.Snapshot(pb.SnapshotRequest())):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
