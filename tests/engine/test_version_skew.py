"""Processes of release 0.2.0 and of this tree work together, whichever of them is the older one."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from counted_turns import counted_turns
from little_cluster import JOB, STOP_S, LittleCluster, little_cluster

from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderChannel
from tests.awaited import until_async
from tests.patience import PATIENCE_S
from tests.releases import HEAD, Release, release_0_2_0

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
OUTPUT_TOKENS = 40
TURNS = 6

# Members that are of 0.2.0, all others are of this tree; t is the trainer, with its client.
MIXES = {
    "old-scheduler": {"s"},
    "old-trainer-gateway-and-one-node": {"t", "gw", "n0"},
    "old-nodes-and-gateway": {"n", "gw"},
    "new-trainer-alone": {"s", "n", "gw"},
}
OFTEN = ("old-scheduler", "old-trainer-gateway-and-one-node")


class Trainer:
    """A process that publishes and plays turns."""

    def __init__(self, cluster: LittleCluster, release: Release) -> None:
        self.release = release
        script = Path(__file__).with_name("release_trainer.py")
        argv = (cluster.addresses, cluster.folder / "published", cluster.trainer_port)
        self._process = release.popen(
            str(script),
            *map(str, argv),
            cluster.seed,
            cluster.urls[0],
            log=cluster.folder / "trainer.log",
        )

    async def __call__(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        async with asyncio.timeout(PATIENCE_S):
            line = await asyncio.to_thread(self._process.stdout.readline)
        assert line, "the trainer ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def skewed(old: Collection[str]) -> dict[str, Release]:
    release = release_0_2_0()
    return dict.fromkeys(old, release)


async def right_turns(trainer: Trainer, first: int, version: int) -> None:
    """Turns are answered, and each token is stamped with the version that is served."""
    turns = (await trainer(f"turns {first} {TURNS}"))["turns"]
    for k, (tokens, versions) in enumerate(turns, first):
        assert tokens == [*range(k + 1, k + 1 + OUTPUT_TOKENS)]
        assert versions == [[version, 0, OUTPUT_TOKENS]]


async def stopped(cluster: LittleCluster) -> None:
    """The operator stops the harvest: no lease and no guest is left."""
    async with LeaderChannel(cluster.addresses) as operator:
        request = pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF)
        await operator.call(lambda stub, left_s: stub.SetHarvest(request, timeout=left_s), STOP_S)
    await cluster.until("without leases", lambda seen: not seen.leases)
    for node, host in cluster.hosts.items():
        guest = cluster.calls(node, "start")[-1]["pid"]
        await until_async(lambda: not group_alive(guest), PATIENCE_S, f"{node} ended its guest")  # noqa: B023
        await until_async(lambda: not host.harvests, PATIENCE_S, f"{node} grants nothing")  # noqa: B023
        assert cluster.calls(node, "drain"), "its turns were handed back first"


@pytest.mark.parametrize(
    "mix",
    [each if each in OFTEN else pytest.param(each, marks=pytest.mark.nightly) for each in MIXES],
)
async def test_leases_versions_turns_and_a_stop_work_between_releases(
    mix: str, tmp_path: Path
) -> None:
    old = MIXES[mix]
    releases = skewed(old)
    async with little_cluster(
        tmp_path, schedulers=1, nodes=2, gateways=1, releases=releases
    ) as cluster:
        trainer = Trainer(cluster, releases.get("t", HEAD))
        try:
            assert Path((await trainer("start"))["rose"]) == trainer.release.path
            # A client of this tree has turns in flight meanwhile.
            async with counted_turns(cluster.urls, TURNS) as turns:
                await trainer("publish 1")
                await cluster.leased(version=1)
                await right_turns(trainer, 0, version=1)
                await trainer("publish 2")
                seen = await cluster.leased(version=2)
                assert [(job.job, job.latest_version) for job in seen.jobs] == [(JOB, 2)]
                await right_turns(trainer, TURNS, version=2)
            assert turns.versions <= {0, 1, 2}
            await stopped(cluster)
        finally:
            trainer.close()
        for node in cluster.hosts:
            for event in ("command_ignored", "command_refused", "scheduler_lost"):
                assert cluster.events(node, event) == []
            assert len(cluster.events(node, "lease_taken")) == 1, "one lease, until the stop"


@pytest.mark.nightly
async def test_a_cluster_of_0_2_0_is_upgraded_under_load(tmp_path: Path) -> None:
    """Scheduler, nodes, gateways: in the order and in the way that docs/control-plane.md says."""
    releases = skewed({"s", "n", "gw", "t"})
    async with little_cluster(tmp_path, schedulers=1, nodes=2, releases=releases) as cluster:
        trainer = Trainer(cluster, releases["t"])
        try:
            await trainer("start")
            async with counted_turns(cluster.urls) as turns:
                await trainer("publish 1")
                await cluster.leased(version=1)
                for version, name in enumerate(("s0", "n0", "n1", "gw0", "gw1"), 2):
                    member = cluster.members[name]
                    assert await asyncio.to_thread(member.end) == 0
                    member.release = HEAD
                    member.start()
                    seen = await cluster.leased(version=version - 1)
                    assert [(job.job, job.latest_version) for job in seen.jobs] == [
                        (JOB, version - 1)
                    ]
                    if name[0] == "g":
                        await cluster.served(name)
                    await turns.settled()
                    await trainer(f"publish {version}")
                await cluster.leased(version=version)
            assert turns.moved, "the restarts hit turns"
        finally:
            trainer.close()
        for node in cluster.hosts:
            assert cluster.events(node, "command_refused") == []
            assert cluster.calls(node, "wrong_base") == []
