"""Faults of the processes of a control plane, one after the other, in an order that a seed decides.

After each fault turns in flight have come whole, and all is leased again once it is healed.
"""

import asyncio
import random
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rose.operate.client import SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.weight_distribution import WeightPublisher
from tests.engine.fleet.counted_turns import IN_FLIGHT, CountedTurns, counted_turns
from tests.engine.fleet.little_cluster import JOB, LittleCluster, little_cluster, tensors
from tests.harness.programs.etcd_cluster import EtcdCluster, needs_etcd, running_etcd
from tests.harness.waiting import PATIENCE_S, until_async

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
STALENESS = 99
# Room for the file of leases, which is written in place, and for no transaction.
FULL_BYTES = 6_400

Fault = Callable[[LittleCluster, CountedTurns], Awaitable[None]]


def others(cluster: LittleCluster, kind: str, name: str) -> str:
    return next(each.name for each in cluster.of(kind) if each.name != name)


async def killed(cluster: LittleCluster, name: str) -> None:
    await asyncio.to_thread(cluster.members[name].end, signal.SIGKILL)


async def unleased(cluster: LittleCluster, replica: str) -> None:
    def gone(seen: pb.SnapshotReply) -> bool:
        return not any(row.leased for row in seen.replicas if row.id == replica)

    await cluster.until(f"{replica} without a lease", gone)


async def nothing_harvested(cluster: LittleCluster) -> float:
    """Seconds until no node of the cluster harvests, with all turns handed back."""
    began_s = time.monotonic()
    for node, host in cluster.hosts.items():
        await until_async(lambda: not host.harvests, PATIENCE_S, f"{node} freezes its guest")  # noqa: B023
        closed = lambda: cluster.calls(node, "admit", "drain")[-1]["call"] == "drain"  # noqa: B023, E731
        await until_async(closed, PATIENCE_S, f"{node} hands its turns back")
    took_s = time.monotonic() - began_s
    assert not any(host.harvests for host in cluster.hosts.values())
    return took_s


# ---- faults ----


async def leader_dies(cluster: LittleCluster, turns: CountedTurns) -> None:
    leader = await cluster.led()
    epochs = epochs_of(await cluster.leased())
    await killed(cluster, leader)
    await cluster.led(but=leader)
    assert epochs_of(await cluster.leased()) == epochs, "leases outlive their leader"
    cluster.members[leader].start()
    await cluster.started(leader)


async def leader_hangs(cluster: LittleCluster, turns: CountedTurns) -> None:
    leader = await cluster.led()
    epochs = epochs_of(await cluster.leased())
    cluster.members[leader].send(signal.SIGSTOP)
    await cluster.led(but=leader)
    assert epochs_of(await cluster.leased()) == epochs, "leases outlive their leader"
    steps_down = len(cluster.events(leader, "scheduler_steps_down"))
    cluster.members[leader].send(signal.SIGCONT)
    await until_async(
        lambda: len(cluster.events(leader, "scheduler_steps_down")) > steps_down,
        PATIENCE_S,
        "it finds its term over",
    )
    assert epochs_of(await cluster.leased()) == epochs, "and changes nothing any more"


async def standby_dies(cluster: LittleCluster, turns: CountedTurns) -> None:
    leader = await cluster.led()
    standby = others(cluster, "s", leader)
    await killed(cluster, standby)
    await turns.more(IN_FLIGHT)
    cluster.members[standby].start()
    await cluster.started(standby)
    assert await cluster.led() == leader


async def standby_hangs(cluster: LittleCluster, turns: CountedTurns) -> None:
    leader = await cluster.led()
    standby = cluster.members[others(cluster, "s", leader)]
    standby.send(signal.SIGSTOP)
    await turns.more(2 * IN_FLIGHT)
    standby.send(signal.SIGCONT)
    await turns.more(IN_FLIGHT)
    assert await cluster.led() == leader


async def node_dies(cluster: LittleCluster, turns: CountedTurns) -> None:
    await killed(cluster, "n1")
    await unleased(cluster, "g1")
    await turns.settled()
    assert not cluster.hosts["n1"].harvests, "nobody grants anything"
    cluster.members["n1"].start()


async def node_hangs(cluster: LittleCluster, turns: CountedTurns) -> None:
    cluster.members["n1"].send(signal.SIGSTOP)
    await unleased(cluster, "g1")
    await turns.settled()
    assert not cluster.hosts["n1"].harvests, "its grant ran out"
    cluster.members["n1"].send(signal.SIGCONT)


async def gateway_dies(cluster: LittleCluster, turns: CountedTurns) -> None:
    await killed(cluster, "gw0")
    await turns.settled()
    cluster.members["gw0"].start()
    await cluster.served("gw0")


async def gateway_hangs(cluster: LittleCluster, turns: CountedTurns) -> None:
    gateway = cluster.members["gw1"]
    gateway.send(signal.SIGSTOP)
    await turns.settled()
    gateway.send(signal.SIGCONT)
    await cluster.served("gw1")


async def all_schedulers_die(cluster: LittleCluster, turns: CountedTurns) -> None:
    for member in cluster.of("s"):
        await killed(cluster, member.name)
    took_s = await nothing_harvested(cluster)
    sys.stdout.write(f"without a leader nothing is harvested after {took_s:.2f} s\n")
    for member in cluster.of("s"):
        member.start()


async def disk_of_the_store_is_full(cluster: LittleCluster, turns: CountedTurns) -> None:
    leader, operator = await cluster.led(), SchedulerClient(cluster.addresses)
    epochs = epochs_of(await cluster.leased())
    full = [member.process.pid for member in cluster.of("s") if member.process]
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in full]
    for pid, (_, hard) in zip(full, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
    await asyncio.to_thread(operator.revoke, "g0", "chaos")
    await unleased(cluster, "g0")
    await turns.more(4 * IN_FLIGHT)
    now = epochs_of(await cluster.until("answers", lambda seen: True))
    ended = epochs.pop("g0")
    assert now == epochs, "live leases go on, and nothing is leased under an epoch that may be lost"
    for pid, limit in zip(full, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert epochs_of(await cluster.leased())["g0"] > ended
    assert await cluster.led() == leader, "its lease is renewed in place, which needs no room"


def epochs_of(seen: pb.SnapshotReply) -> dict[str, int]:
    return {lease.replica: lease.epoch for lease in seen.leases}


# Others have tests of their own, or cost more than they say in each run.
SOME: tuple[Fault, ...] = (leader_hangs, node_hangs, all_schedulers_die, disk_of_the_store_is_full)
FAULTS: tuple[Fault, ...] = (
    *SOME,
    leader_dies,
    standby_dies,
    standby_hangs,
    node_dies,
    gateway_dies,
    gateway_hangs,
)


async def survived(cluster: LittleCluster, faults: list[Fault]) -> None:
    """One fault after the other; after each a version is published and served by all."""
    publisher = WeightPublisher(
        JOB,
        cluster.addresses,
        cluster.folder / "published",
        cluster.trainer_port,
        cluster.key,
        STALENESS,
    )
    async with publisher, counted_turns(cluster.urls) as turns:
        await cluster.leased()
        for version, fault in enumerate(faults):
            began_s = time.monotonic()
            await fault(cluster, turns)
            await cluster.leased()
            await turns.settled()
            await publisher.publish(version + 1, version, tensors(version), tensors(version + 1))
            seen = await cluster.leased(version + 1)
            assert [job.job for job in seen.jobs] == [JOB]
            told = getattr(fault, "__name__", "")
            sys.stdout.write(f"{told}: healed in {time.monotonic() - began_s:.1f} s\n")
        assert turns.moved, "the faults hit turns"


async def test_turns_and_leases_survive_faults_of_the_control_plane(tmp_path: Path) -> None:
    async with little_cluster(tmp_path, nodes=2) as cluster:
        await survived(cluster, random.Random(0).sample(SOME, len(SOME)))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
async def test_they_survive_every_fault_in_any_order(tmp_path: Path, seed: int) -> None:
    async with little_cluster(tmp_path) as cluster:
        await survived(cluster, random.Random(seed).sample(FAULTS, len(FAULTS)))


@needs_etcd
@pytest.mark.nightly
async def test_they_survive_the_loss_of_all_members_of_etcd(tmp_path: Path) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    with running_etcd(folder, members=3) as etcd:

        async def store_is_gone(cluster: LittleCluster, turns: CountedTurns) -> None:
            await nothing_left(etcd, cluster)

        store = f"etcd://{','.join(etcd.endpoints)}/rose-test"
        async with little_cluster(tmp_path, store=store) as cluster:
            await survived(cluster, [store_is_gone, leader_hangs, leader_dies])


async def nothing_left(etcd: EtcdCluster, cluster: LittleCluster) -> None:
    """All members die, and start again once no node harvests any more."""
    for member in range(3):
        await asyncio.to_thread(etcd.kill, member)
    took_s = await nothing_harvested(cluster)
    sys.stdout.write(f"without a store nothing is harvested after {took_s:.2f} s\n")
    assert cluster.leader() is None
    for member in range(3):
        etcd.start(member)
    await asyncio.to_thread(etcd.wait)
