"""A gateway says which policy version each replica serves, and why a turn went where it did."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scheduler_cases import JOB, RunningScheduler

from rose.cli.cluster.explain import explain
from rose.client import BlockingRolloutClient, GatewayUnavailable, RolloutClient
from rose.contract.fields import UNVERSIONED
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.gateway import Gateway, GatewaySettings
from rose.gateway.replicas.jobs import DefaultVersions, JobVersions
from rose.gateway.replicas.watch import WatchedTable
from rose.gateway.settings import StalenessRule, parse_settings
from rose.rpc import rose_pb2 as pb
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import (
    base_url,
    begin,
    entry,
    failing_over,
    gateway_with,
    serving,
    until,
)
from tests.unit.gateway.wire_cases import VLLM, ask, get, vllm_body


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
        RunningScheduler(tmp_path) as scheduler,
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
    def serving_now(url: str) -> int:
        with BlockingRolloutClient(url) as client:
            return client.versions().serving(0)

    async with serving() as (_, gateway, _):
        assert await asyncio.to_thread(serving_now, base_url(gateway)) == 1


# ---- callers that say no version are held to the bound that the operator gave ----

ANY_JOB, OF_A, REGISTERED = StalenessRule("", 1), StalenessRule("a", 0), StalenessRule("b", None)


def test_each_job_is_held_to_its_own_bound_behind_what_was_announced() -> None:
    bounds = DefaultVersions((ANY_JOB, OF_A, REGISTERED))
    bounds.announced = {"a": JobVersions(7, 3), "b": JobVersions(9, 4), "c": JobVersions(5, 0)}
    assert [bounds.oldest(job) for job in "abc"] == [7, 5, 4]
    bounds.announced = {"a": JobVersions(0, 3), "c": JobVersions(1, 0)}
    assert [bounds.oldest(job) for job in "ac"] == [None, None], "there is nothing older"


def test_without_a_rule_or_a_scheduler_nothing_is_made_up() -> None:
    bounds = DefaultVersions(())
    bounds.announced = {"a": JobVersions(7, 3)}
    assert bounds.oldest("a") is None
    assert DefaultVersions((REGISTERED,)).oldest("b") is None


def test_without_a_scheduler_the_newest_replica_says_what_is_latest() -> None:
    bounds = DefaultVersions((ANY_JOB,))
    stand_in = StandInReplica(version=6)
    stand_in.url = "http://127.0.0.1:1"
    bounds.set_table([entry(stand_in, "own-0"), entry(stand_in, "own-1", policy_version=4)])
    assert bounds.oldest("") == 5
    bounds.set_table([entry(stand_in, "own-0", policy_version=-1)])
    assert bounds.oldest("") is None, "a stock engine has no versions"


async def test_a_turn_that_says_nothing_waits_for_a_replica_within_the_bound() -> None:
    replicas = StandInReplica(version=4), StandInReplica(version=6)
    async with failing_over(*replicas, max_staleness=(ANY_JOB,)) as (old, new, gw, session):
        gw.set_table((entry(old, "own-0"),))
        gw.dispatcher.default_versions.announced = {}
        assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
        gw.set_table((entry(old, "own-0"), entry(new, "own-1", healthy=False)))
        waiting = begin(session, vllm_body(2, request_id="turn"))
        await until(lambda: gw.status().waiting == 1)
        # The caller's own version counts, even an older one.
        explicit, answer, _ = await ask(session, VLLM, vllm_body(2, min_version=3))
        gw.set_table((entry(old, "own-0"), entry(new, "own-1")))
        status, later, _ = await waiting
        # Asked again under a newer version it is the same turn.
        gw.set_table((entry(new, "own-1", policy_version=9),))
        again, same, _ = await ask(session, VLLM, vllm_body(2, request_id="turn"))
    assert (explicit, answer["versions"][0]["version"]) == (200, 4)
    assert (status, later["versions"][0]["version"]) == (200, 6)
    assert (again, same["versions"]) == (200, later["versions"])


async def test_the_table_of_the_scheduler_brings_versions_and_bounds() -> None:
    heard: list[dict[str, JobVersions]] = []
    table = WatchedTable("127.0.0.1:1", "g", 5.0, lambda *a, **k: None, on_versions=heard.append)
    row = pb.JobRow(job="a", latest_version=7, max_staleness=2)
    table._note(lambda *rows: None, pb.ReplicaTable(jobs=[row]))
    assert heard == [{"a": JobVersions(7, 2)}]


@pytest.mark.parametrize(
    ("said", "rules"),
    [
        (["2"], (StalenessRule("", 2),)),
        (["1", "grpo=0"], (StalenessRule("", 1), StalenessRule("grpo", 0))),
        (["registered"], (StalenessRule("", None),)),
        (["a=b=registered"], (StalenessRule("a=b", None),)),
    ],
)
def test_the_command_line_takes_a_bound_for_all_jobs_or_one(said: list[str], rules: Any) -> None:
    assert parsed(said).max_staleness == rules


@pytest.mark.parametrize("said", [["-1"], ["x"], ["=1"], ["a="], ["1.5"], ["1", "2"]])
def test_a_bound_that_is_none_is_refused(said: list[str]) -> None:
    with pytest.raises(ConfigError, match="--max-staleness"):
        parsed(said)


def parsed(said: list[str]) -> Any:
    more = [f"--max-staleness={each}" for each in said]
    return parse_settings(["--port", "0", "--scheduler", "127.0.0.1:1", *more])


# ---- explanations ----


async def test_a_trajectory_can_be_asked_why() -> None:
    async with failing_over() as (_, _, gateway, http):
        for turn in ("q1", "q2"):
            body = vllm_body(4, request_id=turn, session_id="episode/1")
            assert (await ask(http, VLLM, body))[0] == 200
        told = await get(http, "/rose/v1/explain/episode%2F1")
        assert [each["request_id"] for each in told["decisions"]] == ["q1", "q2"]
        first, second = told["decisions"]
        assert second["replica"] == first["replica"]
        assert {name for name, _ in first["weighed"]} == {"guest-0", "own-0"}
        assert second["why"] == "holds the prefix"
        assert 0 <= second["age_s"] < 60
        found = await asyncio.to_thread(explain, base_url(gateway), "episode/1")
        lines = [str(line) for line in found.lines]
        assert len(lines) == 2
        assert f"q2  -> {first['replica']}: holds the prefix" in lines[1]
        with pytest.raises(RefusedError, match="remembers no choice for 'unheard'"):
            await asyncio.to_thread(explain, base_url(gateway), "unheard")


def test_a_gateway_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UnavailableError, match="no gateway answers"):
        explain("http://127.0.0.1:1", "x")
    with pytest.raises(ConfigError, match="write http"):
        explain("file:///etc", "x")
