"""A gateway says which policy version each replica serves, and a client can wait for one."""

import asyncio
from pathlib import Path

import pytest
from gateway_cases import base_url, entry, gateway_with, until
from scheduler_cases import JOB, RunningScheduler

from rose.client import BlockingRolloutClient, GatewayUnavailable, RolloutClient
from rose.contract.fields import UNVERSIONED
from rose.gateway import Gateway, GatewaySettings
from rose.gateway.replicas.jobs import JobVersions
from rose.rpc import rose_pb2 as pb
from tests.fakes.memory_store import InMemoryStore
from tests.fakes.replica import StandInReplica


async def test_each_replica_is_told_with_its_job_version_and_state() -> None:
    async with StandInReplica() as replica:
        rows = (
            entry(replica, "g0", job="a", policy_version=4),
            entry(replica, "g1", job="a", policy_version=3, healthy=False),
            entry(replica, "g2", job="b", policy_version=9),
            entry(replica, "g3", job="", leased=False),
            entry(replica, "g4", job="a", policy_version=UNVERSIONED),
        )
        async with gateway_with(*rows) as gateway, RolloutClient(base_url(gateway)) as client:
            gateway.set_table(rows, ("a", "b"))
            announced = {"a": JobVersions(4, 0), "b": JobVersions(9, 0)}
            gateway.dispatcher.default_versions.announced = announced
            told = await client.versions()
            assert [(r.id, r.job, r.version, r.state) for r in told.replicas] == [
                ("g0", "a", 4, "serving"),
                ("g1", "a", 3, "syncing"),
                ("g2", "b", 9, "serving"),
                ("g3", "", 0, "idle"),
                ("g4", "a", None, "serving"),
            ]
            assert (told.latest("a"), told.latest("b"), told.latest()) == (4, 9, 9)
            assert (told.serving(4, "a"), told.serving(5, "a"), told.serving(3)) == (1, 0, 2)
            one = await client.versions("b")
            assert [each.id for each in one.replicas] == ["g2"]
            assert [each.job for each in one.jobs] == ["b"]
            # A trainer may ask before the gateway has heard of its job.
            assert (await client.versions("c")).serving(0) == 0


async def test_versions_of_a_scheduler_follow_what_is_announced(tmp_path: Path) -> None:
    async with (
        RunningScheduler(tmp_path, InMemoryStore()) as scheduler,
        Gateway(GatewaySettings(scheduler=f"127.0.0.1:{scheduler.port}", port=0)) as gateway,
        RolloutClient(base_url(gateway), job=JOB) as client,
    ):
        await until(lambda: JOB in gateway.dispatcher.default_versions.announced)
        assert (await client.versions()).latest() == 0
        for version in (1, 2):
            announced = {"version": version, "parent": version - 1, "url": "http://t"}
            await scheduler.stub.AnnounceVersion(pb.AnnounceVersionRequest(job=JOB, **announced))
        versions = gateway.dispatcher.default_versions
        await until(lambda: versions.announced[JOB].latest == 2)
        assert (await client.versions()).latest(JOB) == 2


async def test_without_a_gateway_the_error_says_which_one_was_asked() -> None:
    async with RolloutClient(["http://127.0.0.1:9"]) as client:
        with pytest.raises(GatewayUnavailable, match=r"127\.0\.0\.1:9"):
            await client.versions()


async def test_plain_code_asks_the_same() -> None:
    async with StandInReplica() as replica, gateway_with(entry(replica, "g0")) as gateway:

        def ask() -> int:
            with BlockingRolloutClient(base_url(gateway)) as client:
                return client.versions().serving(0)

        assert await asyncio.to_thread(ask) == 1
