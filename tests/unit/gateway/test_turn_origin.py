"""Turns say their trajectory, group and job; lengths are forecast by them."""

from typing import Any

import pytest
from gateway_cases import base_url, entry, gateway_with, serving
from wire_cases import GENERATE_ROUTES, VLLM, ask, body_of, stream, vllm_body

from rose.client import RolloutClient, Sampling
from tests.fakes.replica import StandInReplica

NAMES = {"session_id": "s", "group_id": "g", "job": "j"}
HEADERS = {"X-Session-ID": "s", "X-Group-ID": "g", "X-Rose-Job": "j"}


def needs(gateway: Any) -> list[Any]:
    """Record the router's need of each turn that begins from now on."""
    seen: list[Any] = []
    router = gateway.dispatcher.jobs.of("")
    begin = router.begin

    def noting(replica: str, need: Any, now_s: float) -> Any:
        seen.append(need)
        return begin(replica, need, now_s)

    router.begin = noting
    return seen


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_body_and_headers_name_the_same_on_every_route(path: str) -> None:
    async with serving() as (_, gw, session):
        seen = needs(gw)
        assert (await ask(session, path, {**body_of(path, 9), **NAMES}))[0] == 200
        assert (await ask(session, path, body_of(path, 9), headers=HEADERS))[0] == 200
        other = dict.fromkeys(NAMES, "other")
        assert (await stream(session, path, {**body_of(path, 9), **other}, headers=HEADERS))[
            0
        ] == 200
        assert (await ask(session, path, body_of(path, 9)))[0] == 200
    named = [(need.session, need.group, need.job) for need in seen]
    assert named == [("s", "g", "j")] * 3 + [("", "", "")]


async def test_the_lengths_of_some_members_forecast_the_others() -> None:
    async with serving() as (replica, gw, session):
        replica.stop_after = 5
        for name in ("a", "b", "c"):
            body = vllm_body(900, request_id=name, group_id="g", job="j")
            assert (await ask(session, VLLM, body))[0] == 200
        for group in ("g", "h"):
            body = vllm_body(900, request_id=group, group_id=group, job="j")
            assert (await ask(session, VLLM, body))[0] == 200
        expected = {
            group: gw.dispatcher.jobs.of("").explained(group)[0].expected_tokens
            for group in ("a", "g", "h")
        }
    assert expected == {"a": 900, "g": 5, "h": 900}


async def test_the_client_sends_groups_and_jobs_of_turns_sessions_and_groups() -> None:
    two = Sampling(max_tokens=2)
    async with (
        StandInReplica() as replica,
        gateway_with(entry(replica, "guest-0")) as gw,
        RolloutClient(base_url(gw)) as client,
    ):
        seen = needs(gw)
        async with client.gather_group([1, 5], two, 2, group_id="g", job="j") as group:
            assert [member.error async for member in group] == [None, None]
        async with client.session("s", group_id="g") as session:
            await session.generate([1, 5], two, job="j")
            async with session.stream([1, 5], two) as turn:
                assert [chunk async for chunk in turn]
        await client.generate([1, 5], two)
    named = [(need.session, need.group, need.job) for need in seen]
    assert sorted(named[:2]) == [("g/0", "g", "j"), ("g/1", "g", "j")]
    assert named[2:4] == [("s", "g", "j"), ("s", "g", "")]
    assert named[4][1:] == ("", "")
