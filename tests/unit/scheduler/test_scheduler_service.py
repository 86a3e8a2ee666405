"""A scheduler over real gRPC: streams, durable answers, leaders, and a full disk."""

import asyncio
import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.main import scheduler
from rose.main.scheduler import SchedulerSettings, main, serve
from rose.operate.client import SchedulerClient
from rose.process.background_tasks import TaskDiedError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import MAX_REQUEST_BYTES, make_channel, make_server
from rose.rpc.leader_channel import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    SEARCH_PAUSE_S,
    SKIPS,
    LeaderChannel,
    LeaderFinder,
)
from rose.rpc.rose_pb2_grpc import SchedulerServicer, SchedulerStub
from rose.scheduler import SchedulerService, service
from rose.scheduler.core.messages import Action, Attached, Event
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import Saved, load
from rose.scheduler.service import LeaderHandlers
from rose.store import Expect, Put, SqliteStore, StoreName, Write
from rose.store.sqlite import BUSY_TIMEOUT_S
from tests.fakes.memory_store import InMemoryStore
from tests.harness.waiting import PATIENCE_S


async def table_where(watch: AsyncIterator[pb.ReplicaTable], **wanted: object) -> pb.ReplicaTable:
    """The first table whose only row has these values; none: the first without rows."""
    async with asyncio.timeout(PATIENCE_S):
        async for table in watch:
            if wanted and len(table.replicas) == 1:
                if all(getattr(table.replicas[0], k) == v for k, v in wanted.items()):
                    return table
            elif not wanted and not table.replicas:
                return table
    raise AssertionError("the watch ended")


async def test_the_whole_round_from_offer_to_loss(bench: Bench, tmp_path: Path) -> None:
    watch = aiter(bench.stub.WatchReplicas(pb.WatchReplicasRequest(gateway="gw")))
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j", max_staleness=0))
    node = FakeNode(bench.stub)
    assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_ACTIVE
    node.offer()
    assert (await node.hears("lease")).lease.epoch == 1
    await table_where(watch, id="g0", leased=True, lease_epoch=1, healthy=True, job="j")

    announced = await bench.stub.AnnounceVersion(
        pb.AnnounceVersionRequest(job="j", version=1, parent=0, url="http://t")
    )
    assert announced.nodes == 1
    assert (await node.hears("version")).version.url == "http://t"
    await table_where(watch, healthy=False)
    node.say(activation=pb.Activation(replica="g0", version=1, ok=True))
    await table_where(watch, healthy=True, policy_version=1)

    node.say(revocation=pb.Revocation(replica="g0", epoch=1, reason="pressure"))
    await table_where(watch, leased=False)
    assert (await node.hears("lease")).lease.epoch == 2
    assert (await bench.stub.Revoke(pb.RevokeRequest(replica="g0", reason="op"))).epoch == 2
    assert (await node.hears("release")).release.epoch == 2
    assert (await node.hears("lease")).lease.epoch == 3
    reply = await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    assert reply.released == 1
    assert (await node.hears("release")).release.epoch == 3
    node.say(telemetry=pb.Telemetry(host=pb.HostTelemetry(node="n0", running=4)))
    for _ in range(300):
        snapshot = await bench.stub.Snapshot(pb.SnapshotRequest())
        if snapshot.hosts:
            break
        await asyncio.sleep(0.01)
    assert snapshot.hosts[0].running == 4
    assert snapshot.leases[0].state == "releasing"

    await node.leave()
    await table_where(watch)
    lines = (tmp_path / "events-scheduler.jsonl").read_text().splitlines()
    names = [json.loads(line)["event"] for line in lines]
    for name in ("node_attached", "lease_granted", "version_announced", "revoked", "node_lost"):
        assert name in names


async def test_heartbeats_go_to_every_node(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_S", 0.01)
    node = FakeNode(bench.stub)
    await node.hears("harvest")
    for _ in range(3):
        assert await node.hears(None) == pb.NodeCommand()
    await node.leave()


async def test_what_waits_for_a_node_is_not_sent_once_another_may_lead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(bench.stub)
    await node.hears("harvest")
    [queue] = bench.service._queues.values()
    monkeypatch.setattr(bench.service, "_leads", lambda: False)
    queue.put(pb.NodeCommand(version=pb.Version(job="j", version=1, url="http://t")))
    async with asyncio.timeout(PATIENCE_S):
        assert await node.call.code() is grpc.StatusCode.UNAVAILABLE
    told = [node.told.get_nowait() for _ in range(node.told.qsize())]
    assert not any(command.HasField("version") for command in told)
    await node.leave()


async def test_refusals_carry_their_line_and_code(bench: Bench) -> None:
    for call, code in (
        (
            bench.stub.Revoke(pb.RevokeRequest(replica="x")),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (bench.stub.SetHarvest(pb.SetHarvestRequest()), grpc.StatusCode.INVALID_ARGUMENT),
        (bench.stub.RegisterJob(pb.RegisterJobRequest()), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is code
        assert ";" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (pb.NodeReport(node="n0", offers=pb.Offers()), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.NodeReport(hello=pb.Hello(protocol=2)), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.NodeReport(node="n0", hello=pb.Hello(protocol=1)),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_a_stream_without_a_proper_hello_is_refused(
    bench: Bench, report: pb.NodeReport, code: grpc.StatusCode
) -> None:
    async def outgoing() -> AsyncIterator[pb.NodeReport]:
        yield report

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in bench.stub.Attach(outgoing()):
            pass
    assert caught.value.code() is code


async def test_a_node_cannot_speak_for_another(bench: Bench) -> None:
    node = FakeNode(bench.stub)
    await node.hears("harvest")
    node.node = "n1"
    node.offer()
    async with asyncio.timeout(PATIENCE_S):
        assert await node.call.code() is grpc.StatusCode.ABORTED
    assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).replicas


async def test_the_second_stream_of_a_node_ends_the_first(bench: Bench) -> None:
    first = FakeNode(bench.stub)
    await first.hears("harvest")
    second = FakeNode(bench.stub)
    await second.hears("harvest")
    async with asyncio.timeout(PATIENCE_S):
        assert await first.call.code() is grpc.StatusCode.ABORTED
    await second.leave()


async def test_a_stop_ends_every_stream(bench: Bench) -> None:
    node = FakeNode(bench.stub)
    watch = bench.stub.WatchReplicas(pb.WatchReplicasRequest())
    await node.hears("harvest")
    await watch.read()
    bench.service.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await node.call.code() is grpc.StatusCode.ABORTED
        assert await watch.code() is grpc.StatusCode.OK


async def test_an_oversized_message_is_refused(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Revoke(pb.RevokeRequest(reason="x" * (MAX_REQUEST_BYTES + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class LockedStore(InMemoryStore):
    """Store whose file another program has locked: a write takes its time and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = asyncio.Event()

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        if not self.is_open.is_set():
            await asyncio.sleep(0.05)
            raise UnavailableError("database is locked")
        return await super().txn(expect, writes)


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(Bench(LockedStore(), tmp_path, answer_s=0.4)) as bench:
        yield bench


async def test_what_is_not_durable_is_neither_answered_nor_told(locked: Bench) -> None:
    store = locked.store
    assert isinstance(store, LockedStore)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await locked.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ask again" in (caught.value.details() or "")
    assert not (await locked.stub.Snapshot(pb.SnapshotRequest())).jobs
    store.is_open.set()
    await locked.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    assert await store.get("jobs/j") is not None
    assert [each.job for each in (await locked.stub.Snapshot(pb.SnapshotRequest())).jobs] == ["j"]


async def test_the_harvest_is_closed_at_once_and_opened_when_that_is_durable(
    locked: Bench,
) -> None:
    store = locked.store
    assert isinstance(store, LockedStore)
    node = FakeNode(locked.stub)
    assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_ACTIVE
    opening = asyncio.ensure_future(
        locked.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_ACTIVE))
    )
    await asyncio.sleep(0.02)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await locked.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await node.hears("harvest")).harvest.mode == pb.HARVEST_MODE_OFF
    store.is_open.set()
    await asyncio.gather(opening, return_exceptions=True)
    await locked.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    snapshot = await locked.stub.Snapshot(pb.SnapshotRequest())
    assert snapshot.harvest == pb.HARVEST_MODE_OFF, "an older ACTIVE does not come after it"
    await node.leave()


async def test_a_locked_store_ends_neither_the_scheduler_nor_a_live_lease(
    locked: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked.service._writer, "_stalled_after_s", 0.2)
    store = locked.store
    assert isinstance(store, LockedStore)
    store.is_open.set()
    await locked.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    node = FakeNode(locked.stub)
    node.offer()
    assert (await node.hears("lease")).lease.epoch == 1
    store.is_open.clear()
    both = [{"replica": "g0", "epoch": 1}, {"replica": "g1"}]
    fields = {"kind": 1, "url": "http://g0", "ttl_s": 3.0, "healthy": True}
    node.say(offers=pb.Offers(offers=[pb.Offer(**fields, **each) for each in both]))
    await shows(locked, lambda snapshot: snapshot.store_stalled_s > 0)
    assert (await node.hears("lease")).lease.replica == "g0", "renewed"
    store.is_open.set()
    while (lease := (await node.hears("lease")).lease).replica != "g1":
        continue
    assert lease.epoch == 1
    log = (tmp_path / "events-scheduler.jsonl").read_text()
    assert "store_stalled" in log
    assert "store_answers" in log
    assert not (await locked.stub.Snapshot(pb.SnapshotRequest())).store_stalled_s
    await node.leave()


async def test_a_lock_of_another_program_on_the_file_is_outlived(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    async with running(Bench(store, tmp_path, answer_s=0.1)) as bench:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(BUSY_TIMEOUT_S / 2):
            assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).jobs
        other.execute("ROLLBACK")
        await shows(bench, lambda snapshot: bool(snapshot.jobs))
        assert not bench.ticking.done()
    other.close()
    await store.close()


async def test_a_slow_watcher_gets_the_newest_table_only() -> None:
    slot = service.TableSlot()
    for revision in (1, 2, 3):
        slot.put(pb.ReplicaTable(revision=revision))
    newest = await slot.get()
    assert newest is not None
    assert newest.revision == 3
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slot.get(), 0.01)


async def test_a_node_that_takes_nothing_is_let_go() -> None:
    queue = service.CommandQueue(limit=2)
    for _ in range(5):
        queue.put(pb.NodeCommand())
    assert [await queue.get() is None for _ in range(3)] == [False, False, True]
    assert queue.closed


def test_a_busy_port_is_one_line_and_exit_code_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        argv = ["--port", str(port), "--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}/l"]
        assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "--port" in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--port", "x", "--store", "s", "--log-dir", "l"],
        ["--port", "70000", "--store", "s", "--log-dir", "l"],
        ["--store", "s", "--log-dir", "l", "--harvest", "ON"],
        ["--store", "s", "--log-dir", "l", "--cooldown-s", "nan"],
        ["--store", "/proc/none/s", "--log-dir", "l"],
        ["--store", "", "--log-dir", "l"],
        ["--store", "etcd://", "--log-dir", "l"],
        ["--store", "etcd://h:1,h", "--log-dir", "l"],
        ["--store", "etcd://h:1", "--store-user", "u", "--log-dir", "l"],
        ["--store", "etcd://h:1", "--store-cert", "c", "--store-key", "k", "--log-dir", "l"],
        ["--store", "s", "--store-ca", "c", "--log-dir", "l"],
        ["--store", "s", "--log-dir", "l", "--advertise", "h"],
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    argv: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capfd.readouterr().err.count("\n") == 1


def _settings(folder: Path, name: str) -> SchedulerSettings:
    return SchedulerSettings(
        "127.0.0.1",
        0,
        StoreName(str(folder / "s.sqlite")),
        folder / name,
        HarvestMode.OFF,
        1.0,
    )


async def _says(folder: Path, name: str, event: str) -> None:
    log = folder / name / "events-scheduler.jsonl"
    async with asyncio.timeout(PATIENCE_S):
        while not (log.exists() and event in log.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_of_two_on_a_store_one_leads_and_the_other_follows_it_when_it_stops(
    tmp_path: Path,
) -> None:
    stop_one, stop_other = asyncio.Event(), asyncio.Event()
    one = asyncio.create_task(serve(_settings(tmp_path, "one"), stop_one))
    await _says(tmp_path, "one", "scheduler_leads")
    other = asyncio.create_task(serve(_settings(tmp_path, "other"), stop_other))
    await _says(tmp_path, "other", "scheduler_started")
    assert not other.done()
    stop_one.set()
    await one
    await _says(tmp_path, "one", "scheduler_stopped")
    await _says(tmp_path, "other", "scheduler_leads")
    stop_other.set()
    await other


async def test_a_standby_refuses_every_call_and_names_the_leader(tmp_path: Path) -> None:
    leader = ["h:1"]
    handlers = LeaderHandlers(lambda: leader[0])
    server = make_server()
    server.add_generic_rpc_handlers((handlers,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with make_channel(address) as channel:
        stub = SchedulerStub(channel)
        for call in (
            stub.Snapshot(pb.SnapshotRequest()),
            stub.WatchReplicas(pb.WatchReplicasRequest()),
            stub.Attach(iter([pb.NodeReport(node="n")])),
        ):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(await call.trailing_metadata())["rose-leader"] == "h:1"
        leader[0] = ""
        call = stub.Snapshot(pb.SnapshotRequest())
        assert dict(await call.trailing_metadata())["rose-leader"] == ""
        bench = Bench(InMemoryStore(), tmp_path)
        handlers.lead(bench.service)
        await stub.Snapshot(pb.SnapshotRequest())
        handlers.stand_by()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Snapshot(pb.SnapshotRequest())
        await bench.channel.close()
        bench.events.close()
    await server.stop(0)


async def test_one_that_is_not_sure_to_lead_acts_on_nothing(bench: Bench) -> None:
    bench.service._leads = lambda: False
    node = FakeNode(bench.stub)
    assert await node.call.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await node.leave()


async def test_nodes_that_come_together_are_let_in_one_in_each_turn_of_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand greeted at once would keep the process from keeping its lead."""
    turn, greeted, step = 0, list[int](), bench.core.step

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def watched(event: Event, now_s: float) -> list[Action]:
        if isinstance(event, Attached):
            greeted.append(turn)
        return step(event, now_s)

    monkeypatch.setattr(bench.core, "step", watched)
    counting = asyncio.create_task(turns())
    nodes = [FakeNode(bench.stub, f"n{number}") for number in range(16)]
    for node in nodes:
        await node.hears("harvest")
    counting.cancel()
    assert len(set(greeted)) == len(greeted) == len(nodes)
    for node in nodes:
        await node.leave()


# ---- channel to the leader ----


class Leading(SchedulerServicer):
    """Answers, and refuses what an operator asks for."""

    async def RegisterJob(
        self, request: pb.RegisterJobRequest, context: object
    ) -> pb.RegisterJobReply:
        return pb.RegisterJobReply(latest_version=7)

    async def Revoke(
        self, request: pb.RevokeRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.RevokeReply:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it has no lease")
        raise AssertionError


class Process:
    """One scheduler: a standby that names `leader`, until it leads."""

    def __init__(self) -> None:
        self.leader = ""
        self.handlers = LeaderHandlers(lambda: self.leader)
        self.server = make_server()
        self.server.add_generic_rpc_handlers((self.handlers,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def lead(self) -> None:
        self.handlers.lead(Leading())  # type: ignore[abstract]


@pytest.fixture
async def two() -> AsyncIterator[tuple[Process, Process]]:
    both = Process(), Process()
    for each in both:
        await each.server.start()
    yield both
    for each in both:
        await each.server.stop(0)


async def register(channel: LeaderChannel, timeout_s: float = 10.0) -> int:
    request = pb.RegisterJobRequest(job="j")
    reply = await channel.call(
        lambda stub, left_s: stub.RegisterJob(request, timeout=left_s), timeout_s
    )
    return reply.latest_version


async def test_a_leader_that_is_not_in_the_list_is_found_by_a_standbys_word(
    two: tuple[Process, Process],
) -> None:
    standby, leader = two
    standby.leader = leader.address
    leader.lead()
    async with LeaderChannel(standby.address) as channel:
        assert await register(channel) == 7
        assert channel.address == leader.address


async def test_one_that_is_gone_is_passed_over_and_a_new_leader_is_waited_for(
    two: tuple[Process, Process],
) -> None:
    one, other = two
    gone = f"127.0.0.1:{free_port()}"
    one.leader = other.leader = gone
    async with LeaderChannel(f"{gone},{one.address},{other.address}") as channel:
        asked = asyncio.create_task(register(channel))
        await asyncio.sleep(0)
        other.lead()
        assert await asked == 7
        await other.server.stop(0)
        one.lead()
        assert await register(channel) == 7
        assert channel.address == one.address


async def test_a_machine_that_takes_no_connection_is_passed_over(
    two: tuple[Process, Process],
) -> None:
    """Its address answers nothing at all: neither yes nor no."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    two[0].lead()
    async with LeaderChannel(f"127.0.0.1:{silent.getsockname()[1]},{two[0].address}") as channel:
        assert await register(channel) == 7
    silent.close()


async def test_without_a_leader_a_call_ends_with_the_time_that_it_has(
    two: tuple[Process, Process],
) -> None:
    async with LeaderChannel(f"{two[0].address},{two[1].address}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="standby"):
            await register(channel, 0.2)
    async with LeaderChannel(f"127.0.0.1:{free_port()}") as channel:
        with pytest.raises(UnavailableError, match="no scheduler answers"):
            await register(channel, 0.2)


async def test_an_operators_command_follows_the_leader_and_is_not_repeated(
    two: tuple[Process, Process],
) -> None:
    standby, leader = two
    standby.leader = leader.address
    leader.lead()
    client = SchedulerClient(f"127.0.0.1:{free_port()},{standby.address}")
    with pytest.raises(RefusedError, match="it has no lease"):
        await asyncio.to_thread(client.revoke, "g0", "operator")


async def test_an_operators_command_without_a_leader_ends_with_a_line(
    two: tuple[Process, Process],
) -> None:
    client = SchedulerClient(f"{two[0].address},{two[1].address}", timeout_s=0.3)
    with pytest.raises(UnavailableError, match=r"as the leader|knows of no leader"):
        await asyncio.to_thread(client.revoke, "g0", "operator")


def test_each_address_is_asked_once_before_a_pause_and_pauses_stay_short_for_a_while() -> None:
    finder = LeaderFinder("a:1,b:1")
    asked, pauses = [], []
    for _ in range(6):
        asked.append(finder.address)
        finder.missed("dead:1" if finder.address == "b:1" else "")
        pauses.append(finder.pause_s)
    assert asked == ["a:1", "b:1", "dead:1", "a:1", "b:1", "dead:1"]
    assert pauses == [0, 0, FIRST_PAUSE_S, 0, 0, 2 * FIRST_PAUSE_S]
    longest = []
    for _ in range(200):
        finder.missed()
        longest.append(finder.pause_s)
    assert SEARCH_PAUSE_S in longest
    assert longest[-2:].count(0.0) >= 1
    assert max(longest) == MAX_PAUSE_S
    finder.answered()
    assert finder.pause_s == 0


def test_a_leader_named_by_a_standby_is_left_for_the_other_and_not_for_itself() -> None:
    finder = LeaderFinder("a:1,b:1,c:1")
    finder.missed()
    finder.missed("a:1")
    finder.answered()
    finder.missed()
    assert finder.address == "b:1"


def test_one_that_fell_silent_is_not_asked_again_at_once_though_a_standby_names_it() -> None:
    finder = LeaderFinder("hangs:1,standby:1")
    finder.missed(silent=True)
    asked = []
    for _ in range(SKIPS + 2):
        asked.append(finder.address)
        finder.missed("hangs:1" if finder.address == "standby:1" else "")
    assert asked == [*["standby:1"] * (SKIPS + 1), "hangs:1"], "and it is not forgotten"


def test_the_next_leader_is_believed_when_it_names_one_that_was_silent_before() -> None:
    finder = LeaderFinder("hung:1,standby:1")
    finder.missed(silent=True)
    finder.answered()
    finder.missed("hung:1")
    assert finder.address == "hung:1"


def test_an_only_scheduler_is_asked_again_though_it_fell_silent() -> None:
    finder = LeaderFinder("a:1")
    finder.missed(silent=True)
    assert finder.address == "a:1"


async def test_the_connection_to_one_that_fell_silent_is_given_up(
    two: tuple[Process, Process],
) -> None:
    """A process that is stopped keeps its connections: they say nothing about its life."""
    hangs, standby = two
    hangs.lead()
    standby.leader = hangs.address
    async with LeaderChannel(f"{hangs.address},{standby.address}") as channel:
        before = await channel.connected()
        channel.missed(TimeoutError())
        assert channel.address == standby.address
        await channel.connected()
        assert before.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_an_only_scheduler_is_asked_again_after_a_pause() -> None:
    finder = LeaderFinder("a:1")
    finder.missed()
    assert (finder.address, finder.pause_s) == ("a:1", FIRST_PAUSE_S)


def test_a_hint_that_is_no_address_is_none() -> None:
    finder = LeaderFinder("a:1,b:1")
    finder.missed("http://x/\n")
    assert finder.address == "b:1"


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:70000", "a:1,,b:1", "http://a:1", "a:1;b:1"])
def test_what_is_no_list_of_addresses_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        LeaderFinder(text)


def test_addresses_of_ipv6_are_in_brackets() -> None:
    assert LeaderFinder("[::1]:7400, h:1").addresses == ("[::1]:7400", "h:1")


async def test_slo_budgets_are_those_of_the_store_and_saved_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "BUDGETS_EVERY_S", 0.01)
    store = InMemoryStore()
    for term in range(1, 3):
        saved = load((await store.list("")).entries)
        core = SchedulerCore(saved, HarvestMode.OFF)
        keeping = asyncio.create_task(
            scheduler._keep_budgets(core, saved, store)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0)
        core.capacity.gate.budgets.serve("n", 90, 10, time.monotonic(), lends=False)
        async with asyncio.timeout(PATIENCE_S):
            while sum(_requests(load((await store.list("")).entries))) < 100 * term:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        keeping.cancel()
    broken = Put("slo_budgets", b'{"chat": [[0, -1, 0]]}')
    await store.txn((), [broken])
    with pytest.raises(ConfigError, match="the store holds what no scheduler wrote"):
        load((await store.list("")).entries)


def _requests(saved: Saved) -> list[int]:
    return [good + bad for slices in saved.slo_budgets.values() for _, good, bad in slices]


# ---- full disk ----


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
