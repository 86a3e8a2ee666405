"""Each component is restarted once, in its turn, under load: nothing is lost or doubled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rose.rpc import rose_pb2 as pb
from rose.weight_distribution import WeightPublisher
from tests.engine.fleet.counted_turns import IN_FLIGHT, CountedTurns, counted_turns
from tests.engine.fleet.little_cluster import JOB, LittleCluster, little_cluster, tensors
from tests.harness.programs.etcd_cluster import needs_etcd, running_etcd

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
STALENESS = 9


class Training:
    """Versions of one job, one after the other, as turns are made, until it is told to end."""

    def __init__(self, publisher: WeightPublisher, turns: CountedTurns) -> None:
        self.version = 0
        self.ends = False
        self._publisher = publisher
        self._turns = turns

    async def run(self) -> None:
        while not self.ends:
            await self._turns.more(IN_FLIGHT)
            new = self.version + 1
            await self._publisher.publish(new, self.version, tensors(self.version), tensors(new))
            self.version = new


@contextlib.asynccontextmanager
async def training(
    cluster: LittleCluster, turns: CountedTurns
) -> AsyncIterator[tuple[Training, asyncio.Task[None]]]:
    """A trainer that publishes until the end, and its task."""
    folder = cluster.folder / "published"
    publisher = WeightPublisher(
        JOB, cluster.addresses, folder, cluster.trainer_port, cluster.key, STALENESS
    )
    async with publisher:
        training = Training(publisher, turns)
        task = asyncio.create_task(training.run())
        try:
            yield training, task
        finally:
            task.cancel()
            # An error with which it broke off is reported.
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=[needs_etcd, pytest.mark.nightly])])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield ""
        return
    folder = tmp_path / "etcd"
    folder.mkdir()
    with running_etcd(folder, members=3) as etcd:
        yield f"etcd://{','.join(etcd.endpoints)}/rose-test"


async def restarted(cluster: LittleCluster, name: str) -> None:
    """SIGTERM, and the same process again, until it does its work."""
    member = cluster.members[name]
    assert await asyncio.to_thread(member.end) == 0, cluster.last_words()
    member.start()
    if name[0] == "s":
        await cluster.started(name)
        await cluster.led()
    elif name[0] == "g":
        await cluster.served(name)


def row_of(seen: pb.SnapshotReply, replica: str) -> pb.Replica:
    return next(row for row in seen.replicas if row.id == replica)


async def test_nothing_is_lost_while_each_component_is_restarted_in_its_turn(
    tmp_path: Path, store: str
) -> None:
    async with (
        little_cluster(tmp_path, store=store) as cluster,
        counted_turns(cluster.urls) as turns,
        training(cluster, turns) as (job, trains),
    ):
        await cluster.leased()
        leader = await cluster.led()
        standby = next(each.name for each in cluster.of("s") if each.name != leader)
        for name in (standby, leader, "n0", "n1", "n2", "gw0", "gw1"):
            before = await cluster.leased()
            version = job.version
            await restarted(cluster, name)
            after = await cluster.leased()
            for number in range(3):
                old, new = (row_of(seen, f"g{number}").lease_epoch for seen in (before, after))
                if name == f"n{number}":
                    assert new > old, "its own lease ended, under an epoch that never comes again"
                else:
                    assert new == old, f"{name} was restarted, and g{number} lost its lease"
            assert [each.job for each in after.jobs] == [JOB]
            assert after.latest_version >= version
            await turns.settled()
        # The version that every replica is to reach is one after which none comes.
        restarted_at, job.ends = job.version, True
        await trains
        assert job.version > restarted_at
        await cluster.leased(job.version)
        assert turns.moved, "the restarts hit turns"
        for node in cluster.hosts:
            assert len(cluster.events(node, "lease_taken")) == 2
            assert cluster.calls(node, "wrong_base") == []
