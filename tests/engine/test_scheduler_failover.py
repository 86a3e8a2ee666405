"""Two scheduler processes on a store: the one that leads is ended, and nothing is lost."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rose.addresses import free_ports
from rose.cli.commands import SchedulerClient
from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.logs.eventlog import EventLog
from rose.node.lease_fsm import HeldLease
from rose.node.scheduler_session import SchedulerSession
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderChannel
from tests.etcd_cluster import needs_etcd, running_etcd
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
JOB, REPLICA = "grpo", "g0"


class Schedulers:
    """Processes on one store, by number."""

    def __init__(self, folder: Path, store: str, count: int = 2) -> None:
        self._folder = folder
        self._store = store
        self._ports = free_ports(count)
        self._processes = [self._start(number) for number in range(count)]

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        argv = [
            *(sys.executable, "-m", "rose.scheduler.main", f"--port={self._ports[number]}"),
            *(f"--store={self._store}", f"--log-dir={self._folder}/{number}", "--harvest=ACTIVE"),
        ]
        with (self._folder / f"{number}.err").open("wb") as errors:
            return subprocess.Popen(argv, stderr=errors)

    def says(self, number: int) -> str:
        log = self._folder / str(number) / "events-scheduler.jsonl"
        return log.read_text() if log.exists() else ""

    def leader(self, but: int | None = None) -> int | None:
        """Which of those that run leads, by their logs; None while none does."""
        for number, process in enumerate(self._processes):
            said = self.says(number)
            leads = said.rfind("scheduler_leads") > said.rfind("steps_down")
            if number != but and process.poll() is None and leads:
                return number
        return None

    def end(self, number: int, how: signal.Signals) -> None:
        self._processes[number].send_signal(how)
        if how is not signal.SIGSTOP:
            self._processes[number].wait()

    def resume(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Node:
    """The session of a node with one replica, whose lease is kept as its agent would."""

    def __init__(self, addresses: str, folder: Path) -> None:
        self.lease = HeldLease()
        self.epochs: list[int] = []
        self.refused = 0
        self.ended: list[str] = []
        self.events = EventLog(folder, "node")
        self.session = SchedulerSession(addresses, "n0", self._reports, self._obey, self.events)

    def _reports(self) -> list[pb.NodeReport]:
        now_s = time.monotonic()
        held = None
        if self.lease.active(now_s):
            left_s = self.lease.until_s - now_s
            held = pb.HeldLease(job=JOB, epoch=self.lease.epoch, left_s=left_s)
        offer = pb.Offer(
            replica=REPLICA,
            kind=pb.REPLICA_KIND_GUEST,
            url="http://127.0.0.1:9",
            ttl_s=3.0,
            healthy=True,
            epoch=self.lease.epoch,
            held=held,
        )
        return [pb.NodeReport(node="n0", offers=pb.Offers(offers=[offer]))]

    def _obey(self, command: pb.NodeCommand) -> None:
        if command.HasField("lease"):
            taken = self.lease.grant(command.lease.epoch, command.lease.ttl_s, time.monotonic())
            self.refused += not taken
            self.epochs.append(command.lease.epoch)
        if command.HasField("release"):
            self.ended.append(command.release.reason)


class Gateway:
    """A gateway's view of the table: each time, the epochs of leased replicas."""

    def __init__(self, addresses: str) -> None:
        self.tables: list[dict[str, int]] = []
        self.watch = WatchedTable(addresses, "gw", 5.0, lambda *a, **kw: None)

    def sink(self, entries: tuple[ReplicaEntry, ...], jobs: tuple[str, ...]) -> None:
        del jobs
        self.tables.append({each.id: each.lease_epoch for each in entries if each.leased})


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=needs_etcd)])
def schedulers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Schedulers]:
    with contextlib.ExitStack() as stack:
        store = str(tmp_path / "s.sqlite")
        if request.param == "etcd":
            folder = tmp_path / "etcd"
            folder.mkdir()
            cluster = stack.enter_context(running_etcd(folder))
            store = f"etcd://{','.join(cluster.endpoints)}/rose-test"
        made = Schedulers(tmp_path, store)
        stack.callback(made.close)
        yield made


@pytest.fixture
async def running(
    schedulers: Schedulers, tmp_path: Path
) -> AsyncIterator[tuple[Schedulers, Node, Gateway]]:
    async with following(schedulers, tmp_path) as (node, gateway):
        yield schedulers, node, gateway


@contextlib.asynccontextmanager
async def following(schedulers: Schedulers, folder: Path) -> AsyncIterator[tuple[Node, Gateway]]:
    """A node and a gateway, each with its own way to the leader."""
    node, gateway = Node(schedulers.addresses, folder), Gateway(schedulers.addresses)
    tasks = [
        asyncio.create_task(node.session.run()),
        asyncio.create_task(gateway.watch.run(gateway.sink)),
    ]
    yield node, gateway
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    node.events.close()


async def leased(node: Node, gateway: Gateway) -> None:
    """Until the replica is leased, and both have heard of it."""
    async with asyncio.timeout(PATIENCE_S):
        while gateway.tables[-1:] != [{REPLICA: 1}] or not node.epochs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def announce(channel: LeaderChannel, version: int) -> None:
    request = pb.AnnounceVersionRequest(
        job=JOB, version=version, parent=version - 1, url="http://127.0.0.1:9"
    )
    await channel.call(lambda stub, left_s: stub.AnnounceVersion(request, timeout=left_s), 20.0)


async def register(channel: LeaderChannel) -> int:
    request = pb.RegisterJobRequest(job=JOB, max_staleness=9)
    call = channel.call(lambda stub, left_s: stub.RegisterJob(request, timeout=left_s), 20.0)
    return (await call).latest_version


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["dies", "stops", "hangs"]
)
async def test_a_leader_that_ends_takes_no_lease_job_or_version_with_it(
    running: tuple[Schedulers, Node, Gateway],
    how: signal.Signals,
) -> None:
    schedulers, node, gateway = running
    async with LeaderChannel(schedulers.addresses) as trainer:
        await register(trainer)
        await announce(trainer, 1)
        await leased(node, gateway)
        first = schedulers.leader()
        assert first is not None
        tables, renewals = len(gateway.tables), len(node.epochs)
        began_s = time.monotonic()
        await asyncio.to_thread(schedulers.end, first, how)
        async with asyncio.timeout(PATIENCE_S):
            while schedulers.leader(but=first) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            led_s = time.monotonic() - began_s
            while len(node.epochs) == renewals:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            renewed_s = time.monotonic() - began_s
            while len(gateway.tables) == tables:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            table_s = time.monotonic() - began_s
    async with LeaderChannel(schedulers.addresses) as trainer:
        assert await register(trainer) == 1
        await announce(trainer, 2)
        snapshot = await asyncio.to_thread(SchedulerClient(schedulers.addresses).snapshot)
        if how is signal.SIGSTOP:
            schedulers.resume(first)
            async with asyncio.timeout(PATIENCE_S):
                while "scheduler_steps_down" not in schedulers.says(first):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await announce(trainer, 3)
    assert [job.job for job in snapshot.jobs] == [JOB]
    assert snapshot.latest_version == 2
    assert [(lease.replica, lease.epoch) for lease in snapshot.leases] == [(REPLICA, 1)]
    # A lease that had run out would not have been taken under its old epoch.
    assert set(node.epochs) == {1}
    assert not node.refused
    assert not node.ended
    assert all(table == {REPLICA: 1} for table in gateway.tables[tables:])
    sys.stdout.write(f"led {led_s:.2f} s, renewed {renewed_s:.2f} s, table {table_s:.2f} s\n")


@needs_etcd
@pytest.mark.nightly
async def test_the_loss_of_etcds_own_leader_costs_no_lease(tmp_path: Path) -> None:
    """With etcd's own times: a second and more without a leader, in which nothing is answered."""
    folder = tmp_path / "etcd"
    folder.mkdir()
    with (
        running_etcd(folder, members=3, election_ms=1_000) as cluster,
        contextlib.closing(
            Schedulers(tmp_path, f"etcd://{','.join(cluster.endpoints)}")
        ) as schedulers,
    ):
        async with (
            following(schedulers, tmp_path) as (node, gateway),
            LeaderChannel(schedulers.addresses) as trainer,
        ):
            await register(trainer)
            await leased(node, gateway)
            for version in (1, 2):
                lost, tables = await asyncio.to_thread(cluster.leader), len(gateway.tables)
                await asyncio.to_thread(cluster.kill, lost)
                await announce(trainer, version)
                await asyncio.to_thread(cluster.start, lost)
                await asyncio.to_thread(cluster.wait)
                assert all(table == {REPLICA: 1} for table in gateway.tables[tables:])
            assert await register(trainer) == 2
            said = "".join(schedulers.says(number) for number in (0, 1))
            sys.stdout.write(f"{said.count('scheduler_steps_down')} times stepped down\n")
            renewals = len(node.epochs)
            async with asyncio.timeout(PATIENCE_S):
                while len(node.epochs) == renewals:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert set(node.epochs) == {1}
        assert not node.refused
