import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rose.gateway.table import ReplicaEntry
from rose.gateway.watch import WatchedTable
from rose.rpc import rose_pb2, rose_pb2_grpc

TABLE = rose_pb2.ReplicaTable(
    revision=1,
    replicas=[
        rose_pb2.Replica(
            id="guest-0",
            kind=rose_pb2.REPLICA_KIND_GUEST,
            url="http://127.0.0.1:1",
            leased=True,
            lease_epoch=3,
            policy_version=2,
            max_sequences=8,
            healthy=True,
        )
    ],
)


class FakeScheduler(rose_pb2_grpc.SchedulerServicer):
    """Sends one table on each watch, then is silent until the stream is ended."""

    def __init__(self) -> None:
        self.watches = 0

    async def WatchReplicas(
        self, request: Any, context: Any
    ) -> AsyncIterator[rose_pb2.ReplicaTable]:
        self.watches += 1
        yield TABLE
        await asyncio.sleep(60)


async def test_the_table_arrives_expires_in_silence_and_comes_back() -> None:
    fake, server = FakeScheduler(), grpc.aio.server()
    rose_pb2_grpc.add_SchedulerServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tables: list[tuple[ReplicaEntry, ...]] = []
    events: list[str] = []
    watch = WatchedTable(
        f"127.0.0.1:{port}", "gw", 0.1, lambda event, **fields: events.append(event)
    )
    arrived: asyncio.Queue[tuple[ReplicaEntry, ...]] = asyncio.Queue()
    task = asyncio.create_task(watch.run(arrived.put_nowait))
    async with asyncio.timeout(30):
        while () not in tables or not any(tables[tables.index(()) :]):
            tables.append(await arrived.get())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.stop(None)
    assert tables[0][0].id == "guest-0"
    assert tables[0][0].lease_epoch == 3
    back = next(table for table in tables[tables.index(()) :] if table)
    assert back[0].id == "guest-0"
    assert fake.watches >= 2
    assert events[:2] == ["scheduler_connected", "scheduler_lost"]
