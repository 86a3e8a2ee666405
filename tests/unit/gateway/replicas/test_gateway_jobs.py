"""Turns of several jobs at one gateway: each goes to its job's replicas and meets no other's."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rose.client import RolloutClient, Sampling
from rose.gateway import Gateway
from rose.gateway.demand import DemandMeter
from rose.rpc import rose_pb2
from tests.fakes.replica import StandInReplica
from tests.unit.gateway import wire_cases
from tests.unit.gateway.gateway_cases import (
    base_url,
    entry,
    failing_over,
    gateway_with,
    serving,
    until,
)
from tests.unit.gateway.wire_cases import GENERATE_ROUTES, VLLM, body_of, tokens_of, vllm_body

JOBS = ("a", "b")


async def ask(
    gateway: Gateway, body: dict[str, Any] | None = None, path: str = VLLM, **headers: str
) -> tuple[int, Any]:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    asked = (body_of(path) if path in GENERATE_ROUTES else {}) | (body or {})
    async with aiohttp.ClientSession(base_url(gateway)) as http:
        return (await wire_cases.ask(http, path, asked, headers=named))[:2]


@asynccontextmanager
async def two_jobs(
    **settings: Any,
) -> AsyncIterator[tuple[StandInReplica, StandInReplica, Gateway]]:
    """A replica of job a, one of job b, and a gateway that knows both jobs."""
    async with failing_over(StandInReplica(5), **settings) as (one, two, gateway, _):
        gateway.set_table((entry(one, "guest-0", job="a"), entry(two, "guest-1", job="b")), JOBS)
        yield one, two, gateway


@asynccontextmanager
async def one_job(
    job: str, *known: str, **settings: Any
) -> AsyncIterator[tuple[StandInReplica, Gateway]]:
    """A replica of this job, and a gateway that knows these jobs."""
    async with serving(**settings) as (replica, gateway, _):
        gateway.set_table((entry(replica, "guest-0", job=job),), known)
        yield replica, gateway


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_the_job_selects_the_replica_on_every_route(path: str) -> None:
    async with two_jobs() as (one, two, gateway):
        for _ in range(3):
            assert (await ask(gateway, {"job": "a"}, path))[0] == 200
            assert (await ask(gateway, None, path, X_Rose_Job="b"))[0] == 200
            # Both: the header wins.
            assert (await ask(gateway, {"job": "b"}, path, X_Rose_Job="a"))[0] == 200
        assert [each["job"] for each in one.requests] == ["a"] * 6
        assert [each["job"] for each in two.requests] == ["b"] * 3
        # Cached blocks of one job are not another's.
        assert {each["cache_salt"] for each in one.requests} == {"a/"}


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_an_unknown_job_is_not_found_and_none_has_to_be_named(path: str) -> None:
    async with one_job("a", *JOBS) as (one, gateway):
        status, said = await ask(gateway, {"job": "c"}, path)
        assert status == 404
        assert "'c' is not registered" in str(said)
        status, said = await ask(gateway, None, path)
        assert status == 400
        assert "X-Rose-Job" in str(said)
        # A turn that names none is of the only one.
        gateway.set_table((entry(one, "guest-0", job="a"),), ("a",))
        assert (await ask(gateway, None, path))[0] == 200
        assert one.requests[0]["job"] == "a"


async def test_other_routes_know_the_job_too() -> None:
    async with StandInReplica(delay_s=0.05) as one, gateway_with() as gateway:
        gateway.set_table((entry(one, "guest-0", job="a"), entry(one, "guest-1", job="b")), JOBS)
        body = vllm_body(1_000, request_id="r", session_id="s")
        turns = [asyncio.create_task(ask(gateway, body | {"job": job})) for job in JOBS]
        await until(lambda: len(one.requests) == 2)
        for path, names in (
            ("/inference/v1/abort_requests", {"request_ids": ["r"]}),
            ("/finish_session", {"session_id": "s"}),
        ):
            assert (await ask(gateway, names | {"job": "c"}, path))[0] == 404
            assert (await ask(gateway, names, path))[0] == 400
        # One request id of two jobs is two turns, and so is a session.
        names = {"request_ids": ["r"], "job": "a"}
        aborted = await ask(gateway, names, "/inference/v1/abort_requests")
        assert aborted[1] == {"aborted": ["r"]}
        assert (await turns[0])[0] == 409
        assert not turns[1].done()
        ended = await ask(gateway, {"session_id": "s"}, "/finish_session", X_Rose_Job="b")
        assert ended[1]["aborted"] == 1
        assert (await turns[1])[0] == 409
        assert (await ask(gateway, {"prompt": "x"}, "/tokenize", X_Rose_Job="c"))[0] == 404
        async with aiohttp.ClientSession(base_url(gateway)) as http:
            for query, status in (("?job=a", 200), ("?job=c", 404), ("", 400)):
                async with http.get("/rose/v1/explain/r" + query) as reply:
                    assert reply.status == status


async def test_an_answer_of_one_job_is_not_given_to_another() -> None:
    async with two_jobs() as (one, two, gateway):
        for job in ("a", "a", "b"):
            assert (await ask(gateway, {"request_id": "same", "job": job}))[0] == 200
        assert (len(one.requests), len(two.requests)) == (1, 1)


async def test_a_turn_leaves_a_replica_that_another_job_gets() -> None:
    async with StandInReplica() as two, one_job("a", *JOBS) as (one, gateway):
        one.hang_after = 1
        turn = asyncio.create_task(ask(gateway, {"job": "a"}))
        await until(lambda: one.live == 1)
        moved = entry(one, "guest-0", job="b", lease_epoch=2)
        gateway.set_table((moved,), JOBS)
        await until(lambda: one.live == 0)
        assert gateway.status().waiting == 1
        gateway.set_table((moved, entry(two, "guest-1", job="a")), JOBS)
        status, said = await turn
        assert status == 200
        assert tokens_of(said) == [101, 102, 103]
        assert len(two.requests) == 1
        assert len(one.requests) == 1


async def test_turns_that_came_before_the_table_are_the_only_jobs_or_told() -> None:
    async with StandInReplica() as one, gateway_with() as gateway:
        turns = {
            job: asyncio.create_task(ask(gateway, {"job": job} if job else {}))
            for job in ("", "a", "c")
        }
        await until(lambda: gateway.status().waiting == 3)
        gateway.set_table((entry(one, "guest-0", job="a"),), ("a",))
        statuses = {job: (await turn)[0] for job, turn in turns.items()}
        assert statuses == {"": 200, "a": 200, "c": 404}
        assert {each["job"] for each in one.requests} == {"a"}


async def test_turns_of_a_job_that_ends_are_told() -> None:
    async with one_job("b", *JOBS) as (one, gateway):
        turn = asyncio.create_task(ask(gateway, {"job": "a"}))
        await until(lambda: gateway.status().waiting == 1)
        gateway.set_table((entry(one, "guest-0", job="b"),), ("b",))
        assert (await turn)[0] == 404


async def test_a_flood_of_one_job_leaves_another_its_place_in_the_line() -> None:
    async with one_job("b", *JOBS, max_waiting=2) as (_, gateway):
        flood = [asyncio.create_task(ask(gateway, {"job": "a"})) for _ in range(2)]
        await until(lambda: gateway.status().waiting == 2)
        assert (await ask(gateway, {"job": "a"}))[0] == 429
        assert (await ask(gateway, {"job": "b"}))[0] == 200
        for turn in flood:
            turn.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_version_is_the_jobs_own() -> None:
    async with two_jobs(version_wait_s=0.2) as (_, _, gateway):
        assert (await ask(gateway, {"job": "b", "min_version": 2}))[0] == 409
        assert (await ask(gateway, {"job": "a", "min_version": 2}))[0] == 200
        assert (await ask(gateway, {"job": "b", "exact_version": 0}))[0] == 200


async def test_demand_is_reported_for_the_job_that_a_turn_belongs_to() -> None:
    async with one_job("a", "a") as (one, gateway):
        one.hang_after = 0
        turn = asyncio.create_task(ask(gateway))
        await until(lambda: one.live == 1)
        meter = DemandMeter(gateway.dispatcher, "gw", 0.0)
        [job] = meter.report(1.0).jobs
        assert job == rose_pb2.JobDemand(job="a", turns=1, owed_tokens=job.owed_tokens)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)


async def test_a_client_names_its_job_with_turns_and_at_a_sessions_end() -> None:
    two = Sampling(max_tokens=2)
    async with two_jobs() as (one, other, gateway):
        mine: RolloutClient = pickle.loads(pickle.dumps(RolloutClient(base_url(gateway), job="a")))
        async with mine as client:
            async with client.session("s") as session:
                await session.generate([1, 5], two)
                await session.generate([1, 5], two, job="b")
                assert gateway.status().sessions_known > 0
            # Both jobs heard that the session is over.
            assert gateway.status().sessions_known == 0
        assert (len(one.requests), len(other.requests)) == (1, 1)
