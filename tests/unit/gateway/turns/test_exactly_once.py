"""The same request id gets the same turn, whatever became of the connection that asked first."""

import asyncio
import json
from typing import Any

from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import begin, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, payloads, stream, tokens_of, vllm_body

COUNT = list(range(101, 121))


async def read_some(session: Any, events: int, body: Any, **kw: Any) -> list[Any]:
    """The first events of a stream, whose connection then breaks."""
    found: list[Any] = []
    async with session.post(VLLM, json={**body, "stream": True}, **kw) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
            if len(found) == events:
                response.close()
                break
    return found


def joined(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in tokens_of(chunk)]


async def test_a_broken_stream_resumes_where_the_reader_says_and_nothing_is_generated_twice() -> (
    None
):
    async with serving(StandInReplica(delay_s=0.005)) as (replica, _, session):
        body = vllm_body(20, request_id="r")
        had = joined(await read_some(session, 4, body))
        await asyncio.sleep(0.02)
        _, rest = await stream(session, VLLM, {**body, "resume_from": len(had)})
        _, by_header = await stream(session, VLLM, body, headers={"Last-Event-ID": str(len(had))})
        _, again = await stream(session, VLLM, body)
        _, whole, _ = await ask(session, VLLM, body)
    assert had + joined(payloads(rest)) == COUNT
    assert joined(payloads(by_header)) == COUNT[len(had) :]
    assert by_header[0].startswith("id: ")
    assert joined(payloads(again)) == COUNT
    assert tokens_of(whole) == COUNT
    assert len(replica.requests) == 1


async def test_event_ids_count_the_tokens_so_far() -> None:
    async with serving(StandInReplica(delay_s=0.005)) as (_, _, session):
        _, events = await stream(session, VLLM, vllm_body(3), headers={"Last-Event-ID": "0"})
        assert [event.split("\n")[0] for event in events[:3]] == ["id: 1", "id: 2", "id: 3"]


async def test_a_turn_that_nobody_comes_back_for_is_cancelled_after_the_grace() -> None:
    async with serving(resume_grace_s=0.1, stall_s=9) as (replica, _, session):
        replica.hang_after = 3
        await read_some(session, 1, vllm_body(20, request_id="r"))
        await asyncio.sleep(0.05)
        assert replica.live == 1, "within the grace it goes on"
        await until(lambda: replica.cancelled == 1)
        replica.hang_after = None
        status, answer, _ = await ask(session, VLLM, vllm_body(20, request_id="r"))
    assert (status, tokens_of(answer)) == (200, COUNT)


async def test_an_anonymous_stream_is_cancelled_at_once() -> None:
    async with serving(stall_s=9) as (replica, gw, session):
        replica.hang_after = 3
        await read_some(session, 1, vllm_body(20))
        await until(lambda: replica.cancelled == 1)
        assert gw.status().live_turns == {"guest-0": 0}


async def test_many_readers_of_one_turn_get_the_same_tokens() -> None:
    async with serving(StandInReplica(delay_s=0.002)) as (replica, _, session):
        body = vllm_body(20, request_id="r")
        streams = await asyncio.gather(*(stream(session, VLLM, body) for _ in range(10)))
        whole = await asyncio.gather(*(ask(session, VLLM, body) for _ in range(3)))
        other, _, _ = await ask(session, VLLM, {**body, "token_ids": [1, 2]})
    assert all(joined(payloads(events)) == COUNT for _, events in streams)
    assert whole[0][:2] == whole[1][:2] == whole[2][:2]
    assert (len(replica.requests), other) == (1, 400)


async def test_an_abort_ends_the_turn_for_everybody_and_frees_its_id() -> None:
    async with serving(stall_s=9) as (replica, _, session):
        replica.hang_after = 3
        body = vllm_body(20, request_id="r")
        whole = begin(session, body)
        await until(lambda: replica.live == 1)
        _, said, _ = await ask(
            session, "/inference/v1/abort_requests", {"request_ids": ["r", "unknown"]}
        )
        status, answer, _ = await whole
        await until(lambda: replica.cancelled == 1)
        replica.hang_after = None
        again, _, _ = await ask(session, VLLM, body)
        _, rid, _ = await ask(session, "/abort_request", {"rid": "over"})
    assert said == {"aborted": ["r"]}
    assert (status, answer["error"]["type"], again) == (409, "ConflictError", 200)
    assert rid == {"aborted": []}


async def finish(session: Any, name: str) -> Any:
    return (await ask(session, "/finish_session", {"session_id": name}))[1]


async def test_finishing_a_session_ends_and_forgets_its_turns_only() -> None:
    async with serving(stall_s=9) as (replica, gw, session):
        replica.hang_after = 3
        turns = [
            asyncio.create_task(ask(session, VLLM, vllm_body(5), headers={"X-Session-ID": name}))
            for name in ("mine", "mine", "other")
        ]
        await until(lambda: gw.stats.tokens["guest-0"] == 9)
        assert await finish(session, "mine") == {"session_id": "mine", "aborted": 2}
        await until(lambda: replica.cancelled == 2)
        assert replica.live == 1
        assert (await ask(session, "/finish_session", {}))[0] == 400
        # A caller that vanishes leaves no session behind either.
        turns[2].cancel()
        assert [(await turn)[0] for turn in turns[:2]] == [409, 409]
        await until(lambda: not gw.status().running)
        assert gw.status().live_turns == {"guest-0": 0}
        assert gw.status().sessions_known == 0


async def test_the_routers_books_do_not_grow_with_sessions_that_finish() -> None:
    async with serving(answers_kept=1) as (_, gw, session):
        for number in range(10):
            body = vllm_body(3, session_id=f"t{number}")
            assert (await ask(session, VLLM, body))[0] == 200
            assert gw.status().sessions_known == 1
            assert (await finish(session, f"t{number}"))["aborted"] == 0
            assert gw.status().sessions_known == 0


async def test_kept_answers_are_bounded_by_their_bytes() -> None:
    async with serving(answers_bytes=10_000) as (replica, _, session):
        for name in ("first", "second", "large"):
            tokens = 300 if name == "large" else 2
            body = vllm_body(tokens, request_id=name)
            assert (await ask(session, VLLM, body))[0] == 200
        again = vllm_body(300, request_id="large")
        assert tokens_of((await ask(session, VLLM, again))[1])[-1] == 400
        assert len(replica.requests) == 3
        assert (await ask(session, VLLM, vllm_body(2, request_id="first")))[0] == 200
        assert len(replica.requests) == 4
