"""A scheduler over real gRPC in this process, which trainers of one job start and end beside."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.addresses import free_port
from rose.logs.eventlog import EventLog
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import add_SchedulerServicer_to_server
from rose.scheduler import SchedulerCore, SchedulerService
from rose.scheduler.persistence import VersionRecord, load
from rose.weight_distribution import PublisherSettings, WeightPublisher
from tests.fakes.memory_store import InMemoryStore
from weight_transfer import SigningKey

JOB = "grpo"


@dataclass
class RunCluster:
    """Parts that outlive a trainer: the scheduler, its store, the job's key."""

    folder: Path
    store: InMemoryStore
    port: int
    key: SigningKey
    run_ttl_s: float = 10.0

    def trainer(
        self, root: str = "root", job: str = JOB, key: SigningKey | None = None, **options: Any
    ) -> WeightPublisher:
        """A trainer of the job, not started yet."""
        address, settings = f"127.0.0.1:{self.port}", PublisherSettings(**options)
        return WeightPublisher(
            job, address, self.folder / root, free_port(), key or self.key, settings=settings
        )

    @property
    def chain(self) -> list[VersionRecord]:
        """Return the state that a scheduler would start from."""
        return sorted(load(self.store.entries).versions, key=lambda record: record.version)

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """Return (version, parent) of the chain."""
        return [(record.version, record.parent) for record in self.chain]

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[SchedulerService]:
        """One life of the scheduler."""
        events = EventLog(self.folder, "scheduler")
        core = SchedulerCore(load(self.store.entries), run_ttl_s=self.run_ttl_s)
        service = SchedulerService(core, self.store, events)
        server = make_server()
        add_SchedulerServicer_to_server(service, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        ticking = asyncio.create_task(service.tick())
        try:
            yield service
        finally:
            ticking.cancel()
            service.close()
            await server.stop(0)
            events.close()
