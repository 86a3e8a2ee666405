"""A replica that sends nonsense loses that attempt; the turn goes on elsewhere, without it."""

import json

import pytest
from aiohttp import web

from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import begin, entry, failing_over, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, tokens_of, vllm_body

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


class OneAnswerReplica(StandInReplica):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__()
        self.answer = {"status": status, "body": body}

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        self.requests.append(await http.json())
        return web.Response(**self.answer)


KNOWN = ("Duplicate request id", "r.1 is already running")


@pytest.mark.parametrize(
    "mad",
    [
        *(pytest.param((200, line + b"\n"), id=name) for name, line in NONSENSE.items()),
        # An engine that knows an attempt's id already is not its caller's fault.
        *((400, json.dumps({"error": {"message": said}}).encode()) for said in KNOWN),
    ],
)
async def test_nonsense_costs_the_replica_its_attempt_and_reaches_nobody(
    mad: tuple[int, bytes],
) -> None:
    async with failing_over(OneAnswerReplica(*mad)) as (first, good, gw, session):
        gw.set_table((entry(first, "guest-0", max_sequences=9),))
        turn = begin(session, vllm_body(3, exact_version=0))
        await until(lambda: bool(first.requests))
        gw.set_table((entry(first, "guest-0"), entry(good, "guest-1")))
        status, answer, _ = await turn
    assert status == 200
    assert tokens_of(answer) == [101, 102, 103]
    assert [segment["replica"] for segment in answer["segments"]] == ["guest-1"]


async def test_each_life_of_a_turn_has_attempt_ids_of_its_own() -> None:
    async with serving(answers_kept=1) as (replica, _, session):
        for name in ("turn", "another", "turn"):
            assert (await ask(session, VLLM, vllm_body(1, request_id=name)))[0] == 200
    first, _, again = (asked["request_id"] for asked in replica.requests)
    assert first != again
    assert {first.split(".")[0], again.split(".")[0]} == {"turn"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"type":"no","message":"min_p: not here"}}', "min_p: not here"),
        (b'{"error":"no"}', '{"error":"no"}'),
        (b"torn {", "torn {"),
    ],
)
async def test_a_refusal_is_passed_on_in_the_replicas_words(body: bytes, said: str) -> None:
    async with serving(OneAnswerReplica(400, body)) as (_, _, session):
        status, answer, _ = await ask(session, VLLM, vllm_body(3))
        assert status == 400
        assert answer["error"]["message"] == f"guest-0 refuses the turn: {said}"
