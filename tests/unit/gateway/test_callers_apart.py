"""What one caller asked for is its own: another caller's words do not reach it.

The owner and the stranger differ in what they show as `Authorization`, and in their job.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from gateway_cases import base_url, entry, gateway_with, until
from wire_cases import VLLM, ask, vllm_body

from tests.fakes.replica import StandInReplica

TURN, SESSION = "turn-1", "session-1"
REFUSED = {401, 403, 404}


class ReachedError(AssertionError):
    """A stranger's words reached what another caller had asked for."""


pytestmark = pytest.mark.xfail(
    strict=True, raises=ReachedError, reason="callers have no identity yet"
)


@dataclass(frozen=True, slots=True)
class Case:
    replica: StandInReplica
    owner: aiohttp.ClientSession
    stranger: aiohttp.ClientSession

    async def begun(self) -> "asyncio.Task[tuple[int, Any, Any]]":
        """A turn of the owner's that runs."""
        body = vllm_body(5, request_id=TURN, session_id=SESSION, job="a")
        turn = asyncio.create_task(ask(self.owner, VLLM, body))
        await until(lambda: self.replica.live == 1)
        return turn

    async def settled(self, turn: "asyncio.Task[tuple[int, Any, Any]]") -> None:
        """A turn that was ended has ended by now; one that goes on has made no answer yet."""
        await asyncio.wait([turn], timeout=0.1)
        if turn.done():
            raise ReachedError(f"a stranger ended a turn: {turn.result()[0]}")
        turn.cancel()


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    async with StandInReplica() as replica:
        replica.hang_after = 1
        async with (
            gateway_with(entry(replica, "own-0"), stall_s=9) as gateway,
            _caller(base_url(gateway), "a") as owner,
            _caller(base_url(gateway), "b") as stranger,
        ):
            yield Case(replica, owner, stranger)


def _caller(url: str, name: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {name}"})


async def test_a_stranger_aborts_no_turn(case: Case) -> None:
    turn = await case.begun()
    await ask(case.stranger, "/inference/v1/abort_requests", {"request_ids": [TURN]})
    await case.settled(turn)


async def test_a_stranger_ends_no_session(case: Case) -> None:
    turn = await case.begun()
    await ask(case.stranger, "/finish_session", {"session_id": SESSION})
    await case.settled(turn)


async def test_an_id_that_a_stranger_used_is_still_free(case: Case) -> None:
    case.replica.hang_after = None
    taken, _, _ = await ask(case.stranger, VLLM, vllm_body(2, request_id=TURN, job="b"))
    assert taken in {200, 401, 403}
    status, answer, _ = await ask(case.owner, VLLM, vllm_body(3, request_id=TURN, job="a"))
    if status == 400:
        raise ReachedError(answer["error"]["message"])
    assert status == 200


@pytest.mark.parametrize("subject", [SESSION, TURN])
async def test_a_stranger_is_not_told_where_turns_went(case: Case, subject: str) -> None:
    turn = await case.begun()
    async with case.owner.get(f"/rose/v1/explain/{subject}") as told:
        assert told.status == 200
    async with case.stranger.get(f"/rose/v1/explain/{subject}") as told:
        status = told.status
    turn.cancel()
    if status == 200:
        raise ReachedError("a stranger was told another caller's placements")
    assert status in REFUSED
