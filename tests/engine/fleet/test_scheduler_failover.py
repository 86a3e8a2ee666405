"""Two scheduler processes on a store: the one that leads is ended, and nothing is lost."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.micro.failover import (
    JOB,
    REPLICA,
    FollowingGateway,
    FollowingNode,
    SchedulerProcesses,
    announce,
    following,
    leased,
    register,
)
from rose.operate.client import SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.leader_channel import LeaderChannel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from tests.harness.programs.etcd_cluster import needs_etcd, running_etcd
from tests.harness.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=needs_etcd)])
def schedulers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SchedulerProcesses]:
    with contextlib.ExitStack() as stack:
        store = str(tmp_path / "s.sqlite")
        if request.param == "etcd":
            folder = tmp_path / "etcd"
            folder.mkdir()
            cluster = stack.enter_context(running_etcd(folder))
            store = f"etcd://{','.join(cluster.endpoints)}/rose-test"
        made = SchedulerProcesses(tmp_path, store)
        stack.callback(made.close)
        yield made


@pytest.fixture
async def running(
    schedulers: SchedulerProcesses, tmp_path: Path
) -> AsyncIterator[tuple[SchedulerProcesses, FollowingNode, FollowingGateway]]:
    async with following(schedulers, tmp_path) as (node, gateway):
        yield schedulers, node, gateway


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["dies", "stops", "hangs"]
)
async def test_a_leader_that_ends_takes_no_lease_job_or_version_with_it(
    running: tuple[SchedulerProcesses, FollowingNode, FollowingGateway],
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
                while "scheduler_steps_down" not in schedulers.events(first):  # noqa: ASYNC110
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


async def read_on(watch: Any) -> None:
    while True:
        await watch.read()


async def test_a_stream_to_a_scheduler_that_hangs_breaks_though_nothing_is_expected_of_it(
    tmp_path: Path,
) -> None:
    """Its kernel still takes what is sent: only a ping that it does not answer tells."""
    with contextlib.closing(
        SchedulerProcesses(tmp_path, str(tmp_path / "s.sqlite"), count=1)
    ) as schedulers:
        async with LeaderChannel(schedulers.addresses) as trainer:
            await register(trainer)
        async with make_channel(schedulers.addresses) as channel:
            watch = SchedulerStub(channel).WatchReplicas(pb.WatchReplicasRequest(gateway="gw"))
            async with asyncio.timeout(PATIENCE_S):
                await watch.read()
                schedulers.end(0, signal.SIGSTOP)
                with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                    await read_on(watch)


@needs_etcd
@pytest.mark.nightly
async def test_the_loss_of_etcds_own_leader_costs_no_lease(tmp_path: Path) -> None:
    """With etcd's own times: a second and more without a leader, in which nothing is answered."""
    folder = tmp_path / "etcd"
    folder.mkdir()
    with (
        running_etcd(folder, members=3, election_ms=1_000) as cluster,
        contextlib.closing(
            SchedulerProcesses(tmp_path, f"etcd://{','.join(cluster.endpoints)}")
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
            said = "".join(schedulers.events(number) for number in (0, 1))
            sys.stdout.write(f"{said.count('scheduler_steps_down')} times stepped down\n")
            renewals = len(node.epochs)
            async with asyncio.timeout(PATIENCE_S):
                while len(node.epochs) == renewals:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert set(node.epochs) == {1}
        assert not node.refused
