"""What one caller asked for is its own: another caller's words do not reach it.

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
from gateway_cases import base_url, entry, gateway_with, until
from wire_cases import VLLM, ask, vllm_body

from rose.security.tokens import issue
from tests.fakes.replica import StandInReplica
from weight_transfer import SigningKey

TURN, SESSION = "turn-1", "session-1"


@dataclass(frozen=True, slots=True)
class Case:
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
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
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
            yield Case(replica, owner, stranger)


def _caller(url: str, token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"})


async def test_a_stranger_aborts_no_turn(case: Case) -> None:
    turn = await case.begun()
    status, answer, _ = await ask(
        case.stranger, "/inference/v1/abort_requests", {"request_ids": [TURN]}
    )
    assert (status, answer) == (200, {"aborted": []})
    assert case.replica.live == 1
    _, answer, _ = await ask(case.owner, "/inference/v1/abort_requests", {"request_ids": [TURN]})
    assert answer == {"aborted": [TURN]}
    assert (await turn)[0] == 409


async def test_a_stranger_ends_no_session(case: Case) -> None:
    turn = await case.begun()
    status, answer, _ = await ask(case.stranger, "/finish_session", {"session_id": SESSION})
    assert (status, answer["aborted"]) == (200, 0)
    assert case.replica.live == 1
    _, answer, _ = await ask(case.owner, "/finish_session", {"session_id": SESSION})
    assert answer["aborted"] == 1
    assert (await turn)[0] == 409


async def test_an_id_that_a_stranger_used_is_still_free(case: Case) -> None:
    case.replica.hang_after = None
    status, theirs, _ = await ask(case.stranger, VLLM, vllm_body(2, request_id=TURN))
    assert status == 200
    status, answer, _ = await ask(case.owner, VLLM, vllm_body(3, request_id=TURN))
    assert status == 200
    assert answer["request_id"] == theirs["request_id"] == TURN
    status, again, _ = await ask(case.owner, VLLM, vllm_body(3, request_id=TURN))
    assert (status, again) == (200, answer)


async def test_an_identical_request_of_a_stranger_is_a_turn_of_its_own(case: Case) -> None:
    case.replica.hang_after = None
    body = vllm_body(3, request_id=TURN)
    for caller in (case.owner, case.stranger):
        assert (await ask(caller, VLLM, body))[0] == 200
    assert len(case.replica.requests) == 2


@pytest.mark.parametrize("subject", [SESSION, TURN])
async def test_a_stranger_is_not_told_where_turns_went(case: Case, subject: str) -> None:
    turn = await case.begun()
    async with case.owner.get(f"/rose/v1/explain/{subject}") as told:
        assert told.status == 200
        (row,) = (await told.json())["decisions"]
        assert row["request_id"] == TURN
    async with case.stranger.get(f"/rose/v1/explain/{subject}") as told:
        assert told.status == 404
    turn.cancel()


async def test_a_caller_names_its_own_job_or_none(case: Case) -> None:
    case.replica.hang_after = None
    for job in (None, "a"):
        status, _, _ = await ask(case.owner, VLLM, vllm_body(2, job=job))
        assert status == 200
    status, answer, _ = await ask(case.owner, VLLM, vllm_body(2, job="c"))
    assert status == 403
    assert "this caller's job is 'a', not 'c'" in answer["error"]["message"]
    async with case.owner.post(VLLM, json=vllm_body(2), headers={"X-Rose-Job": "c"}) as refused:
        assert refused.status == 403
