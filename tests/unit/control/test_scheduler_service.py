"""The scheduler over real gRPC, with a node that is not one."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from elastic_scheduler import HarvestMode
from rose.errors import ConfigError, UnavailableError
from rose.eventlog import EventLog
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import MAX_MESSAGE_BYTES, make_channel, make_server
from rose.rpc.rose_pb2_grpc import SchedulerStub, add_SchedulerServicer_to_server
from rose.scheduler import LeaseTimes, SchedulerCore, SchedulerService
from rose.scheduler.mailbox import CommandQueue, TableSlot
from rose.scheduler.main import SchedulerSettings, main, serve
from rose.scheduler.saved import load
from rose.store import InMemoryStore


class FakeNode:
    """Offers one guest and remembers what it is told."""

    def __init__(self, stub: SchedulerStub, node: str = "n0") -> None:
        self._reports: asyncio.Queue[pb.NodeReport | None] = asyncio.Queue()
        self._node = node
        self.told: asyncio.Queue[pb.NodeCommand] = asyncio.Queue()
        self.say(hello=pb.Hello(protocol=1))
        self.call = stub.Attach(self._outgoing())
        self._listener = asyncio.create_task(self._listen())

    def say(self, **report: object) -> None:
        self._reports.put_nowait(pb.NodeReport(node=self._node, **report))  # type: ignore[arg-type]

    def offer(self, **changes: object) -> None:
        fields = {"replica": "g0", "kind": 1, "url": "http://g0", "ttl_s": 3.0, "healthy": True}
        self.say(offers=pb.Offers(offers=[pb.Offer(**{**fields, **changes})]))  # type: ignore[arg-type]

    async def hears(self, kind: str) -> pb.NodeCommand:
        async with asyncio.timeout(3):
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
                self.told.put_nowait(command)


class Bench:
    def __init__(self, store: InMemoryStore, folder: Path) -> None:
        self.events = EventLog(folder, "scheduler")
        core = SchedulerCore(load(store), HarvestMode.ACTIVE, LeaseTimes(cooldown_s=0.05))
        self.service = SchedulerService(core, store, self.events)
        self.server = make_server()
        add_SchedulerServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.channel = make_channel(f"127.0.0.1:{port}")
        self.stub = SchedulerStub(self.channel)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(InMemoryStore(), tmp_path)
    await bench.server.start()
    ticking = asyncio.create_task(bench.service.tick())
    yield bench
    ticking.cancel()
    await bench.channel.close()
    await bench.server.stop(0)
    bench.events.close()


async def table_where(watch: AsyncIterator[pb.ReplicaTable], **wanted: object) -> pb.ReplicaTable:
    """The first table whose only row has these values; none: the first without rows."""
    async with asyncio.timeout(3):
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
        (pb.NodeReport(hello=pb.Hello(protocol=1)), grpc.StatusCode.INVALID_ARGUMENT),
        (
            pb.NodeReport(node="n0", hello=pb.Hello(protocol=9)),
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
    node._node = "n1"
    node.offer()
    async with asyncio.timeout(3):
        assert await node.call.code() is grpc.StatusCode.ABORTED
    assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).replicas


async def test_the_second_stream_of_a_node_ends_the_first(bench: Bench) -> None:
    first = FakeNode(bench.stub)
    await first.hears("harvest")
    second = FakeNode(bench.stub)
    await second.hears("harvest")
    async with asyncio.timeout(3):
        assert await first.call.code() is grpc.StatusCode.ABORTED
    await second.leave()


async def test_a_stop_ends_every_stream(bench: Bench) -> None:
    node = FakeNode(bench.stub)
    watch = bench.stub.WatchReplicas(pb.WatchReplicasRequest())
    await node.hears("harvest")
    await watch.read()
    bench.service.close()
    async with asyncio.timeout(3):
        assert await node.call.code() is grpc.StatusCode.ABORTED
        assert await watch.code() is grpc.StatusCode.OK


async def test_an_oversized_message_is_refused(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.Revoke(pb.RevokeRequest(reason="x" * (MAX_MESSAGE_BYTES + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class FailingStore(InMemoryStore):
    def put(self, key: str, value: bytes) -> int:
        raise UnavailableError("disk is full")


async def test_nobody_is_told_what_could_not_be_stored(tmp_path: Path) -> None:
    bench = Bench(FailingStore(), tmp_path)
    await bench.server.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(UnavailableError, match="disk"):
        await bench.service.tick()
    await bench.channel.close()
    await bench.server.stop(0)
    bench.events.close()


async def test_a_slow_watcher_gets_the_newest_table_only() -> None:
    slot = TableSlot()
    for revision in (1, 2, 3):
        slot.put(pb.ReplicaTable(revision=revision))
    newest = await slot.get()
    assert newest is not None
    assert newest.revision == 3
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slot.get(), 0.01)


async def test_a_node_that_takes_nothing_is_let_go() -> None:
    queue = CommandQueue(limit=2)
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
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    argv: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capfd.readouterr().err.count("\n") == 1


async def test_it_stops_when_asked_and_owns_its_store_alone(tmp_path: Path) -> None:
    settings = SchedulerSettings(
        "127.0.0.1", 0, tmp_path / "s.sqlite", tmp_path / "log", HarvestMode.OFF, 1.0
    )
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stop))
    log = tmp_path / "log" / "events-scheduler.jsonl"
    for _ in range(300):
        if log.exists() and "scheduler_started" in log.read_text():
            break
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError, match="running scheduler"):
        await serve(settings, asyncio.Event())
    stop.set()
    await serving
    assert "scheduler_stopped" in log.read_text()
