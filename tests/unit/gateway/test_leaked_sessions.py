"""Leaked sessions: what is over is forgotten, even when its turns were still running."""

import asyncio

import aiohttp
from gateway_cases import base_url, entry, gateway_with, serving, until
from wire_cases import VLLM, ask, vllm_body

from tests.fakes.replica import StandInReplica


async def finish(session: aiohttp.ClientSession, name: str) -> int:
    _, said, _ = await ask(session, "/finish_session", {"session_id": name})
    aborted: int = said["aborted"]
    return aborted


async def test_the_routers_books_do_not_grow_with_sessions_that_finish() -> None:
    async with serving(answers_kept=1) as (_, gw, session):
        for number in range(30):
            body = vllm_body(3, session_id=f"t{number}")
            assert (await ask(session, VLLM, body))[0] == 200
            assert gw.status().sessions_known == 1
            assert await finish(session, f"t{number}") == 0
            assert gw.status().sessions_known == 0


async def test_a_session_that_is_finished_in_the_middle_of_a_turn_is_forgotten_too() -> None:
    async with serving(stall_s=9) as (replica, gw, session):
        replica.hang_after = 3
        turns = [
            asyncio.create_task(ask(session, VLLM, vllm_body(9, session_id=f"t{number}")))
            for number in range(5)
        ]
        await until(lambda: gw.stats.tokens["guest-0"] == 15)
        for number in range(5):
            assert await finish(session, f"t{number}") == 1
        assert [status for status, _, _ in await asyncio.gather(*turns)] == [409] * 5
        await until(lambda: replica.cancelled == 5)
        assert gw.status().live_turns == {"guest-0": 0}
        assert gw.status().sessions_known == 0
        assert not gw.status().running


async def test_callers_that_vanish_leave_no_session_behind() -> None:
    async with StandInReplica() as replica:
        replica.hang_after = 3
        async with gateway_with(entry(replica, "guest-0"), stall_s=9) as gw:
            async with aiohttp.ClientSession(base_url(gw)) as session:
                turn = asyncio.create_task(ask(session, VLLM, vllm_body(9, session_id="t")))
                await until(lambda: gw.stats.tokens["guest-0"] == 3)
                turn.cancel()
                await until(lambda: replica.cancelled == 1)
            await until(lambda: not gw.status().running)
            assert gw.status().sessions_known == 0
