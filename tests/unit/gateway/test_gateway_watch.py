import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.silence import LOOKS, Silence

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
    task = asyncio.create_task(watch.run(lambda rows, _: arrived.put_nowait(rows)))
    async with asyncio.timeout(30):
        while () not in tables or not any(tables[tables.index(()) :]):
            # On a busy machine silence may come before the first table.
            if (table := await arrived.get()) or tables:
                tables.append(table)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.stop(None)
    assert tables[0][0].id == "guest-0"
    assert tables[0][0].lease_epoch == 3
    back = next(table for table in tables[tables.index(()) :] if table)
    assert back[0].id == "guest-0"
    assert fake.watches >= 2
    assert events[:2] == ["scheduler_connected", "scheduler_lost"]


async def test_a_watch_that_breaks_leaves_no_table_behind() -> None:
    """Nobody lets a table expire any more: it counts as expired at once, and the error is told."""
    tables: list[tuple[ReplicaEntry, ...]] = []

    def breaks_once(table: tuple[ReplicaEntry, ...], _: tuple[str, ...]) -> None:
        tables.append(table)
        if len(tables) == 1:
            raise KeyError("a fault of the program")

    watch = WatchedTable("127.0.0.1:1", "gw", 0.05, lambda event, **fields: None)
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup):
            await watch.run(breaks_once)
    assert tables == [(), ()]


async def test_a_row_whose_address_cannot_be_one_is_left_out() -> None:
    class Mixed(FakeScheduler):
        async def WatchReplicas(
            self, request: Any, context: Any
        ) -> AsyncIterator[rose_pb2.ReplicaTable]:
            table = rose_pb2.ReplicaTable(replicas=TABLE.replicas)
            for number, url in enumerate(["http://a..b", "http://" + "a" * 64, "ftp://x", ""]):
                row = table.replicas.add()
                row.CopyFrom(TABLE.replicas[0])
                row.id, row.url = f"bad-{number}", url
            for _ in range(2):
                yield table
            await asyncio.sleep(60)

    server = grpc.aio.server()
    rose_pb2_grpc.add_SchedulerServicer_to_server(Mixed(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    events: list[str] = []
    watch = WatchedTable(
        f"127.0.0.1:{port}", "gw", 60.0, lambda event, **fields: events.append(event)
    )
    arrived: asyncio.Queue[tuple[ReplicaEntry, ...]] = asyncio.Queue()
    task = asyncio.create_task(watch.run(lambda rows, _: arrived.put_nowait(rows)))
    async with asyncio.timeout(30):
        for _ in range(2):
            assert [entry.id for entry in await arrived.get()] == ["guest-0"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.stop(None)
    assert events.count("replica_refused") == 4, "each is noted once"


class TalkingScheduler(FakeScheduler):
    """Sends its table again and again."""

    async def WatchReplicas(
        self, request: Any, context: Any
    ) -> AsyncIterator[rose_pb2.ReplicaTable]:
        while True:
            yield TABLE
            await asyncio.sleep(0.02)


async def test_a_pause_of_the_loop_takes_no_replica_away_while_the_scheduler_talks() -> None:
    server = grpc.aio.server()
    rose_pb2_grpc.add_SchedulerServicer_to_server(TalkingScheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tables: list[tuple[ReplicaEntry, ...]] = []
    events: list[str] = []
    watch = WatchedTable(
        f"127.0.0.1:{port}", "gw", 0.4, lambda event, **fields: events.append(event)
    )
    task = asyncio.create_task(watch.run(lambda rows, _: tables.append(rows)))
    for _ in range(2):
        seen = len(tables)
        async with asyncio.timeout(30):
            while len(tables) <= seen + 2:  # noqa: ASYNC110 - the watch fills it
                await asyncio.sleep(0.01)
        # Nothing runs for much longer than a table lives, the stand-in for a scheduler included.
        time.sleep(1.0)  # noqa: ASYNC251
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.stop(None)
    assert () not in tables
    assert all(row.leased for table in tables for row in table)
    # But as long as none was read, no new turn goes anywhere.
    assert any(not row.healthy for table in tables for row in table)
    assert tables[-1][0].healthy
    assert events == ["scheduler_connected"]


def test_silence_counts_only_while_somebody_listens() -> None:
    now_s = 100.0
    silence = Silence(5.0, lambda: now_s)

    def passes(seconds: float) -> tuple[bool, bool]:
        nonlocal now_s
        now_s += seconds
        silence.look()
        return silence.outdated, silence.too_long

    # However long they are: a few pauses leave time to read what came meanwhile.
    assert [passes(3_600.0) for _ in range(3)] == [(True, False)] * 3
    silence.heard()
    for _ in range(LOOKS - 1):
        assert passes(silence.look_s) == (False, False)
    assert passes(1.01 * silence.look_s) == (True, True)
    # Pauses add up: a process that does nothing but pause gives up in the end, too.
    silence.heard()
    assert [passes(3_600.0)[1] for _ in range(5)] == [False] * 4 + [True]
