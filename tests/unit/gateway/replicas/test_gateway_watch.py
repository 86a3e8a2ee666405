"""The table that a scheduler pushes: it arrives, expires in silence, comes back, and settles."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from scheduler_cases import FakeScheduler, row

from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.silence import LOOKS, PAUSE_LOOKS, Silence

Rows = tuple[ReplicaEntry, ...]


@asynccontextmanager
async def watched(
    fake: FakeScheduler, ttl_s: float
) -> AsyncIterator[tuple[asyncio.Queue[Rows], list[str]]]:
    """Tables of a gateway that watches this scheduler, as they arrive, and its events."""
    server = grpc.aio.server()
    rose_pb2_grpc.add_SchedulerServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    events: list[str] = []
    arrived: asyncio.Queue[Rows] = asyncio.Queue()
    watch = WatchedTable(
        f"127.0.0.1:{port}", "gw", ttl_s, lambda event, **fields: events.append(event)
    )
    task = asyncio.create_task(watch.run(lambda rows, _: arrived.put_nowait(rows)))
    try:
        async with asyncio.timeout(30):
            yield arrived, events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)


async def test_the_table_arrives_expires_in_silence_and_comes_back() -> None:
    fake, tables = FakeScheduler(), []
    async with watched(fake, 0.1) as (arrived, events):
        while () not in tables or not any(tables[tables.index(()) :]):
            # On a busy machine silence may come before the first table.
            if (table := await arrived.get()) or tables:
                tables.append(table)
    assert (tables[0][0].id, tables[0][0].lease_epoch) == ("guest-0", 3)
    back = next(table for table in tables[tables.index(()) :] if table)
    assert back[0].id == "guest-0"
    assert fake.watches >= 2
    assert events[:2] == ["scheduler_connected", "scheduler_lost"]


async def test_a_watch_that_breaks_leaves_no_table_behind() -> None:
    """Nobody lets a table expire any more: it counts as expired at once, and the error is told."""
    tables: list[Rows] = []

    def breaks_once(table: Rows, _: tuple[str, ...]) -> None:
        tables.append(table)
        if len(tables) == 1:
            raise KeyError("a fault of the program")

    watch = WatchedTable("127.0.0.1:1", "gw", 0.05, lambda event, **fields: None)
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup):
            await watch.run(breaks_once)
    assert tables == [(), ()]


async def test_a_row_whose_address_cannot_be_one_is_left_out() -> None:
    urls = ("http://a..b", "http://" + "a" * 64, "ftp://x", "")
    bad = [row(f"bad-{number}", url=url) for number, url in enumerate(urls)]
    table = rose_pb2.ReplicaTable(replicas=[row(), *bad])
    async with watched(FakeScheduler(table, table), 60.0) as (arrived, events):
        for _ in range(2):
            assert [entry.id for entry in await arrived.get()] == ["guest-0"]
    assert events.count("replica_refused") == 4, "each is noted once"


async def test_a_pause_of_the_loop_takes_no_replica_away_while_the_scheduler_talks() -> None:
    tables: list[Rows] = []
    async with watched(FakeScheduler(every_s=0.02), 0.3) as (arrived, events):
        for _ in range(2):
            tables += [await arrived.get() for _ in range(3)]
            # Nothing runs for much longer than a table lives, the scheduler included.
            time.sleep(0.7)  # noqa: ASYNC251
        await asyncio.sleep(0.5)
        while not arrived.empty():
            tables.append(arrived.get_nowait())
    assert () not in tables
    assert all(row.leased for table in tables for row in table)
    # But as long as none was read, no new turn goes anywhere.
    assert any(not row.healthy for table in tables for row in table)
    assert tables[-1][0].healthy
    assert events == ["scheduler_connected"]


def test_replicas_that_a_new_leader_has_not_heard_of_stay_until_it_has_settled() -> None:
    taken: list[dict[str, int]] = []

    def sink(entries: Rows, jobs: tuple[str, ...]) -> None:
        del jobs
        taken.append({each.id: each.lease_epoch for each in entries})

    table = WatchedTable("127.0.0.1:1", "g", 5.0, lambda *a, **kw: None)
    for said in (
        rose_pb2.ReplicaTable(replicas=[row("a", 1), row("b", 1)]),
        rose_pb2.ReplicaTable(settling=True),
        rose_pb2.ReplicaTable(replicas=[row("a", 2)], settling=True),
        rose_pb2.ReplicaTable(replicas=[row("a", 2)]),
    ):
        table._note(sink, said)
    assert taken == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2}]


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
    # A message that waited for this process is as old as the last look before the pause.
    silence.heard()
    assert passes(0.0) == (True, False)
    passes(PAUSE_LOOKS * silence.look_s)
    silence.heard()
    for _ in range(LOOKS - 1):
        assert passes(silence.look_s) == (False, False)
    assert passes(1.01 * silence.look_s) == (True, True)
    # Pauses add up: a process that does nothing but pause gives up in the end, too.
    silence.heard()
    assert [passes(3_600.0)[1] for _ in range(5)] == [False] * 4 + [True]


def test_a_table_that_waited_for_a_paused_process_places_no_turn() -> None:
    now_s, healthy = 100.0, []

    def sink(entries: Rows, jobs: tuple[str, ...]) -> None:
        del jobs
        healthy.append([each.healthy for each in entries])

    table = WatchedTable("127.0.0.1:1", "g", 5.0, lambda *a, **kw: None, lambda: now_s)
    for later_s in (0.0, 60.0, 0.5, 0.6):
        now_s += later_s
        table._note(sink, rose_pb2.ReplicaTable(replicas=[row("a", 1)]))
    assert healthy == [[True], [False], [False], [True]]
