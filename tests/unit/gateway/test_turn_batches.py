"""Turns of one request that begin at one moment go to a replica in one request, and are apart."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from gateway_cases import base_url, calling, entry, gateway_with, until
from wire_cases import COMPLETIONS, ask

from rose.errors import ConfigError
from rose.gateway.backends import batches
from rose.gateway.backends.batches import BatchCollector, BatchedTurn
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.settings import parse_settings
from tests.fakes.http_peer import CHUNKED, Receiver, ScriptedServer, chunk
from tests.fakes.replica import StandInReplica

GENERATE = "/rose/v1/generate"


def body(prompts: int, samples: int = 1, tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": [[1, 100 + 50 * k] for k in range(prompts)],
        "n": samples,
        "max_tokens": tokens,
        "return_token_ids": True,
        **fields,
    }


def right(prompts: int, samples: int = 1, tokens: int = 3) -> list[list[int]]:
    """Return the stand-in's count, each turn unbroken."""
    counted = [[101 + 50 * k + i for i in range(tokens)] for k in range(prompts)]
    return [each for each in counted for _ in range(samples)]


async def asked(
    replicas: Sequence[StandInReplica], ask_for: dict[str, Any], **settings: object
) -> tuple[int, Any]:
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        rows = [entry(replica, f"own-{k}") for k, replica in enumerate(replicas)]
        gw = await stack.enter_async_context(gateway_with(*rows, model_names=("*",), **settings))
        session = await stack.enter_async_context(aiohttp.ClientSession(base_url(gw)))
        status, answer, _ = await ask(session, COMPLETIONS, ask_for)
        await until(lambda: not any(replica.live for replica in replicas))
        return status, answer


def outputs(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    ("prompts", "samples", "settings", "batches"),
    [
        (4, 8, {}, [32]),
        (10, 1, {"turns_per_request": 4}, [4, 4, 2]),
        (3, 1, {"turns_per_request": 1}, []),
        (1, 1, {}, []),
    ],
)
async def test_turns_of_a_request_are_as_few_requests_as_the_operator_allows(
    prompts: int, samples: int, settings: dict[str, Any], batches: list[int]
) -> None:
    replica, turns = StandInReplica(version=4), prompts * samples
    status, answer = await asked([replica], body(prompts, samples), **settings)
    assert (status, outputs(answer)) == (200, right(prompts, samples))
    assert replica.batches == batches
    assert batches or replica.paths == [GENERATE] * turns
    assert len({each["request_id"] for each in replica.requests}) == turns
    assert [v["version"] for each in answer["choices"] for v in each["versions"]] == [4] * turns


def test_no_turn_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="--turns-per-request"):
        parse_settings(["--port=1", "--scheduler=h:1", "--turns-per-request=0"])


async def test_a_batch_that_is_refused_as_a_request_is_asked_turn_by_turn() -> None:
    """One turn that a replica cannot read must not end its neighbours."""
    replica = StandInReplica()
    replica.refuse_batches = True
    status, answer = await asked([replica], body(3))
    assert (status, outputs(answer)) == (200, right(3))
    assert (replica.batches, replica.paths) == ([3], [GENERATE] * 3)


@pytest.mark.parametrize(
    ("fault", "left"),
    [("revoke_after", {4}), ("break_after", {4, 5, 6})],
    ids=["revoked", "broken"],
)
async def test_each_turn_of_a_batch_that_breaks_off_goes_on_elsewhere_without_loss(
    fault: str, left: set[int]
) -> None:
    broken, whole = StandInReplica(), StandInReplica()
    setattr(broken, fault, 2)
    async with broken, whole, calling(entry(broken, "own-0"), model_names=("*",)) as (gw, session):
        going = asyncio.create_task(ask(session, COMPLETIONS, body(4, 2, tokens=6)))
        await until(lambda: len(broken.requests) == 8)
        gw.set_table((entry(broken, "own-0"), entry(whole, "own-1")))
        status, answer, _ = await going
    assert (status, outputs(answer)) == (200, right(4, 2, tokens=6))
    # Journaled tokens are part of the prompt there: nothing is sampled twice.
    rests = [each["sampling"]["max_tokens"] for each in whole.requests]
    assert len(rests) == 8
    assert set(rests) <= left


async def test_a_replica_that_has_no_lease_any_more_is_left_by_all() -> None:
    closed, free = StandInReplica(), StandInReplica()
    closed.draining = True
    status, answer = await asked([closed, free], body(6))
    assert (status, outputs(answer)) == (200, right(6))


async def test_what_one_turn_is_refused_for_is_said_of_it() -> None:
    replica = StandInReplica()
    replica.refuse_at = 1
    status, answer = await asked([replica], body(3))
    assert status == 400
    assert "own-0 refuses the turn: too long" in answer["error"]["message"]


def turn(number: int, tokens: int = 3) -> bytes:
    said = f'"token_ids":[1,{100 * number}],"sampling":{{"max_tokens":{tokens}}}'
    return f'{{"request_id":"r{number}",{said}}}'.encode()


def joined(batches: BatchCollector, url: str, count: int) -> list[tuple[BatchedTurn, Receiver]]:
    heard = [Receiver() for _ in range(count)]
    return [(batches.join(url, GENERATE, turn(k + 1), each), each) for k, each in enumerate(heard)]


async def test_a_turn_that_leaves_is_ended_at_the_replica_and_the_others_go_on() -> None:
    async with StandInReplica() as replica:
        replica.hang_after = 1
        upstream = Upstream()
        (gone, first), (stays, second) = joined(BatchCollector(upstream, 64), replica.url, 2)
        await until(lambda: bool(first.tokens and second.tokens))
        gone.leave(first)
        await until(lambda: replica.left == [0])
        assert replica.live == 2, "the request goes on"
        assert (second.ends, second.finish) == ([], None)
        stays.leave(second)
        await until(lambda: replica.live == 0)
        assert replica.left == [0], "the last one hangs up"
        upstream.close()


async def test_one_that_left_before_it_was_sent_is_not_asked_for() -> None:
    async with StandInReplica() as replica:
        upstream = Upstream()
        seats = joined(BatchCollector(upstream, 64), replica.url, 3)
        seats[1][0].leave(seats[1][1])
        await until(lambda: all(seats[k][1].finish for k in (0, 2)))
        assert replica.batches == [2]
        assert (seats[1][1].tokens, seats[1][1].ends) == ([], [])
        assert [seats[k][1].tokens for k in (0, 2)] == [[101, 102, 103], [301, 302, 303]]
        upstream.close()


async def test_no_connection_is_heard_of_by_all() -> None:
    upstream = Upstream()
    seats = joined(BatchCollector(upstream, 64), "http://127.0.0.1:9", 2)
    await until(lambda: all(heard.ends for _, heard in seats))
    assert all(isinstance(heard.ends[0], OSError) for _, heard in seats)


@pytest.mark.parametrize("line", [b"nonsense\n", b'[9,{"token_ids":[1]}]\n', b'{"turn":0}\n'])
async def test_lines_of_no_turn_end_all_of_them(line: bytes) -> None:
    async with ScriptedServer([CHUNKED + chunk(line)]) as server:
        seats = joined(BatchCollector(Upstream(), 64), server.url, 2)
        await until(lambda: all(heard.ends for _, heard in seats))
        assert all("BackendError" in repr(heard.ends[0]) for _, heard in seats)
        assert [heard.tokens for _, heard in seats] == [[], []]
        for seat, heard in seats:
            seat.leave(heard)


async def test_an_answer_that_does_not_end_after_its_turns_holds_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "REST_OF_ANSWER_S", 0.01)
    lines = b'[0,{"finish_reason":"stop"}]\n[1,{"finish_reason":"length"}]\n'
    async with ScriptedServer([CHUNKED + chunk(lines)]) as server:
        seats = joined(BatchCollector(Upstream(), 64), server.url, 2)
        await until(lambda: server.hung_up == 1)
    assert [heard.finish for _, heard in seats] == ["stop", "length"]
    assert [heard.ends for _, heard in seats] == [[], []]
