"""Turns of one caller are out of another caller's reach.

The owner and the stranger bear tokens of the gateway's operator, for jobs of their own, or for one
job under two names.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.security.tokens import issue
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import base_url, entry, gateway_with, until
from tests.unit.gateway.wire_cases import VLLM, ask, vllm_body
from weight_transfer import SigningKey

TURN, SESSION = "turn-1", "session-1"


@dataclass(frozen=True, slots=True)
class TwoCallers:
    replica: StandInReplica
    owner: aiohttp.ClientSession
    stranger: aiohttp.ClientSession

    async def begun(self) -> "asyncio.Task[tuple[int, Any, Any]]":
        """A turn of the owner's that runs."""
        body = vllm_body(5, request_id=TURN, session_id=SESSION)
        turn = asyncio.create_task(ask(self.owner, VLLM, body))
        await until(lambda: turn.done() or self.replica.live == 1)
        assert not turn.done(), turn.result()
        return turn


@pytest.fixture(params=["another job", "another subject"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TwoCallers]:
    key = SigningKey.generate()
    (tmp_path / "keys").write_text(key.verify_key.hex)
    theirs = ("b", "trainer") if request.param == "another job" else ("a", "eval")
    async with StandInReplica() as replica:
        replica.hang_after = 1
        settings = {"stall_s": 9, "token_keys": tmp_path / "keys"}
        async with (
            gateway_with(entry(replica, "own-0"), **settings) as gateway,
            _caller(base_url(gateway), issue(key, "a")) as owner,
            _caller(base_url(gateway), issue(key, *theirs)) as stranger,
        ):
            yield TwoCallers(replica, owner, stranger)


def _caller(url: str, token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize(
    ("path", "asked", "none", "one"),
    [
        ("/inference/v1/abort_requests", {"request_ids": [TURN]}, [], [TURN]),
        ("/finish_session", {"session_id": SESSION}, 0, 1),
    ],
)
async def test_a_stranger_ends_no_turn_and_no_session(
    case: TwoCallers, path: str, asked: Any, none: Any, one: Any
) -> None:
    turn = await case.begun()
    status, answer, _ = await ask(case.stranger, path, asked)
    assert (status, answer["aborted"], case.replica.live) == (200, none, 1)
    assert (await ask(case.owner, path, asked))[1]["aborted"] == one
    assert (await turn)[0] == 409


async def test_an_id_that_a_stranger_used_is_still_free_and_the_same_request_another_turn(
    case: TwoCallers,
) -> None:
    case.replica.hang_after = None
    answers = []
    for caller, tokens in ((case.stranger, 2), (case.owner, 3), (case.owner, 3)):
        answers.append(await ask(caller, VLLM, vllm_body(tokens, request_id=TURN)))
    assert [(status, a["request_id"]) for status, a, _ in answers] == [(200, TURN)] * 3
    assert answers[1][1] == answers[2][1]
    assert (await ask(case.stranger, VLLM, vllm_body(2, request_id=TURN)))[1] == answers[0][1]
    for caller in (case.owner, case.stranger):
        assert (await ask(caller, VLLM, vllm_body(3, request_id="same")))[0] == 200
    assert len(case.replica.requests) == 4


@pytest.mark.parametrize("subject", [SESSION, TURN])
async def test_a_stranger_is_not_told_where_turns_went(case: TwoCallers, subject: str) -> None:
    turn = await case.begun()
    async with case.owner.get(f"/rose/v1/explain/{subject}") as told:
        assert told.status == 200
        (row,) = (await told.json())["decisions"]
        assert row["request_id"] == TURN
    async with case.stranger.get(f"/rose/v1/explain/{subject}") as told:
        assert told.status == 404
    turn.cancel()


async def test_a_caller_names_its_own_job_or_none(case: TwoCallers) -> None:
    case.replica.hang_after = None
    for job in (None, "a"):
        status, _, _ = await ask(case.owner, VLLM, vllm_body(2, job=job))
        assert status == 200
    status, answer, _ = await ask(case.owner, VLLM, vllm_body(2, job="c"))
    assert status == 403
    assert "this caller's job is 'a', not 'c'" in answer["error"]["message"]
    async with case.owner.post(VLLM, json=vllm_body(2), headers={"X-Rose-Job": "c"}) as refused:
        assert refused.status == 403
