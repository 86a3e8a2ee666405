"""Callers that cannot say `min_version` are held to the bound that the operator gave."""

import asyncio
from typing import Any

import pytest
from gateway_cases import calling, entry, until
from wire_cases import VLLM, ask, vllm_body

from rose.errors import ConfigError
from rose.gateway.replicas.jobs import DefaultVersions, JobVersions
from rose.gateway.replicas.watch import WatchedTable
from rose.gateway.settings import StalenessRule, parse_settings
from rose.rpc import rose_pb2
from tests.fakes.replica import StandInReplica

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
    async with StandInReplica(version=4) as old, StandInReplica(version=6) as new:
        rules = (ANY_JOB,)
        async with calling(entry(old, "own-0"), max_staleness=rules) as (gw, session):
            gw.dispatcher.default_versions.announced = {}
            assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
            rows = entry(old, "own-0"), entry(new, "own-1", healthy=False)
            gw.set_table(rows)
            waiting = asyncio.create_task(ask(session, VLLM, vllm_body(2, request_id="turn")))
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
    row = rose_pb2.JobRow(job="a", latest_version=7, max_staleness=2)
    table._note(lambda *rows: None, rose_pb2.ReplicaTable(jobs=[row]))
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
