"""A replica that sends nonsense loses that attempt; the turn goes on elsewhere, without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from gateway_cases import calling, entry, serving, until
from wire_cases import VLLM, ask, vllm_body

from tests.fakes.replica import StandInReplica

NONSENSE = {
    "a token of 64 bits": b'{"token_ids":[9223372036854775808],"logprobs":[-0.1],"version":0}',
    "a token of 32 bits": b'{"token_ids":[2147483648],"logprobs":[-0.1],"version":0}',
    "a negative token": b'{"token_ids":[5,-1],"logprobs":[-0.1,-0.1],"version":0}',
    "a version of 64 bits": b'{"token_ids":[5],"logprobs":[-0.1],"version":9223372036854775808}',
    "a version that the turn may not have": b'{"token_ids":[5],"logprobs":[-0.1],"version":1}',
    "a positive logprob": b'{"token_ids":[5,6],"logprobs":[-0.1,5.0],"version":0}',
    "KV newer than its tokens": (
        b'{"token_ids":[5],"logprobs":[-0.1],"version":0,"oldest_version":99}'
    ),
    "KV older than any": b'{"token_ids":[5],"logprobs":[-0.1],"version":0,"oldest_version":-2}',
    "a logprob missing": b'{"token_ids":[5,6],"logprobs":[-0.1],"version":0}',
    "tokens beyond the budget": b'{"token_ids":[5,6,7,8],"logprobs":[0,0,0,0],"version":0}',
    "an end that is no text": b'{"token_ids":[],"finish_reason":"s\xfftop"}',
    "an error that is no text": b'{"finish_reason":"stop","message":"\xff"}',
    "a line nested without end": b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}


@asynccontextmanager
async def replica_that_says(line: bytes) -> AsyncIterator[StandInReplica]:
    """A replica with one answer to everything."""

    class Mad(StandInReplica):
        async def _generate(self, http: aiohttp.web.Request) -> aiohttp.web.Response:
            self.requests.append(await http.json())
            return aiohttp.web.Response(body=line + b"\n")

    async with Mad() as replica:
        yield replica


@pytest.mark.parametrize("line", NONSENSE.values(), ids=NONSENSE.keys())
async def test_nonsense_costs_the_replica_its_attempt_and_reaches_nobody(line: bytes) -> None:
    async with (
        replica_that_says(line) as mad,
        StandInReplica() as good,
        calling(entry(mad, "guest-0", max_sequences=9)) as (gw, session),
    ):
        turn = asyncio.create_task(ask(session, VLLM, vllm_body(3, exact_version=0)))
        await until(lambda: bool(mad.requests))
        gw.set_table((entry(mad, "guest-0"), entry(good, "guest-1")))
        status, answer, _ = await turn
    assert status == 200
    assert answer["choices"][0]["token_ids"] == [101, 102, 103]
    assert [segment["replica"] for segment in answer["segments"]] == ["guest-1"]


async def test_each_life_of_a_turn_has_attempt_ids_of_its_own() -> None:
    async with serving(answers_kept=1) as (replica, _, session):
        for name in ("turn", "another", "turn"):
            assert (await ask(session, VLLM, vllm_body(1, request_id=name)))[0] == 200
    first, _, again = (asked["request_id"] for asked in replica.requests)
    assert first != again
    assert {first.split(".")[0], again.split(".")[0]} == {"turn"}


@pytest.mark.parametrize("said", ["Duplicate request id", "r.1 is already running"])
async def test_an_engine_that_knows_an_attempts_id_already_is_not_its_callers_fault(
    said: str,
) -> None:
    class Busy(StandInReplica):
        async def _generate(self, http: aiohttp.web.Request) -> aiohttp.web.Response:
            self.requests.append(await http.json())
            return aiohttp.web.json_response({"error": {"message": said}}, status=400)

    async with (
        Busy() as busy,
        StandInReplica() as good,
        calling(entry(busy, "guest-0", max_sequences=9)) as (gw, session),
    ):
        turn = asyncio.create_task(ask(session, VLLM, vllm_body(3)))
        await until(lambda: bool(busy.requests))
        gw.set_table((entry(busy, "guest-0"), entry(good, "guest-1")))
        status, answer, _ = await turn
    assert (status, answer["choices"][0]["token_ids"]) == (200, [101, 102, 103])
