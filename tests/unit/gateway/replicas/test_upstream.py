"""Connections to replicas, against bare sockets that do what servers do, and what they must not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.gateway.backends import batches, http_pool
from rose.gateway.backends.batches import BatchCollector, BatchedTurn
from rose.gateway.backends.http_pool import Upstream, UpstreamError
from rose.gateway.settings import parse_settings
from tests.fakes.http_peer import CHUNKED, CLOSING, END, OK, WHOLE, Receiver, ScriptedServer, chunk
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import begin, calling, entry, until
from tests.unit.gateway.wire_cases import COMPLETIONS, ask

HI = [200, b"hi", None]


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[tuple[Upstream, ScriptedServer, str]]:
    """A pool of connections, a server, and the server's URL."""
    connections = Upstream()
    async with ScriptedServer(*answers) as server:
        yield connections, server, f"{server.url}/generate?x=1"
        connections.close()


async def asked(connections: Upstream, url: str, body: bytes = b"{}") -> list[object]:
    heard = Receiver()
    connection = await connections.post(url, body, heard)
    await heard.over()
    connection.leave(heard)
    return heard.said


async def test_pieces_are_handed_on_as_they_come_and_the_connection_is_kept() -> None:
    async with serving([CHUNKED, chunk(b"ab"), chunk(b"c") + END], [WHOLE]) as (ups, server, url):
        assert await asked(ups, url, b'{"a":1}') == [200, b"ab", b"c", None]
        assert await asked(ups, url) == HI
    assert server.connections == 1
    request = server.requests[0]
    assert request.startswith(b"POST /generate?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert request.endswith(b'Content-Length: 7\r\n\r\n{"a":1}')


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with serving([WHOLE], [WHOLE]) as (ups, server, url):
        answers = await asyncio.gather(asked(ups, url), asked(ups, url))
    assert answers == [HI] * 2
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "before"),
    [
        ([CHUNKED, chunk(b"ab"), b""], [200, b"ab"]),
        ([b""], []),
        ([b"no HTTP at all\r\n\r\n"], []),
        ([CHUNKED, b"zz\r\n"], [200]),
        ([OK + b"Content-Length: 5\r\n\r\nab", b""], [200, b"ab"]),
    ],
)
async def test_an_answer_that_breaks_off_ends_with_an_error(
    answer: list[bytes], before: list[object]
) -> None:
    async with serving(answer, [WHOLE]) as (ups, server, url):
        *said, error = await asked(ups, url)
        assert said == before
        assert isinstance(error, UpstreamError)
        assert await asked(ups, url) == HI
    assert server.connections == 2


async def test_a_connection_that_its_replica_closes_is_not_used_again() -> None:
    async with serving([CLOSING], [WHOLE, b""], [WHOLE]) as (ups, server, url):
        for _ in range(3):
            assert await asked(ups, url) == HI
            await asyncio.sleep(0.05)
    assert server.connections == 3


async def test_who_leaves_in_mid_answer_hangs_up_at_once() -> None:
    async with serving([CHUNKED, *[chunk(b"a")] * 200]) as (ups, server, url):
        heard = Receiver()
        connection = await ups.post(url, b"{}", heard)
        await until(lambda: len(heard.said) >= 3)
        connection.leave(heard)
        seen = len(heard.said)
        await until(lambda: server.hung_up == 1)
        assert len(heard.said) == seen
        assert None not in heard.said


@pytest.mark.parametrize(("rest", "connections"), [([END], 1), ([chunk(b"a")] * 60, 2)])
async def test_the_rest_of_an_answer_may_come_for_a_while(
    rest: list[bytes], connections: int
) -> None:
    async with serving([CHUNKED, chunk(b"ab"), *rest], [WHOLE]) as (ups, server, url):
        heard = Receiver()
        connection = await ups.post(url, b"{}", heard)
        await until(lambda: b"ab" in heard.said)
        connection.leave(heard, 0.2)
        await asyncio.sleep(0.4)
        assert await asked(ups, url) == HI
        connection.leave(heard)
    assert heard.said[:2] == [200, b"ab"]
    assert server.connections == connections


async def test_a_receivers_error_ends_its_answer_and_no_other() -> None:
    class Clumsy(Receiver):
        def body(self, data: bytes) -> None:
            raise KeyError(data)

    async with serving([WHOLE], [WHOLE]) as (ups, _, url):
        clumsy = Clumsy()
        await ups.post(url, b"{}", clumsy)
        await clumsy.over()
        assert isinstance(clumsy.said[-1], KeyError)
        assert await asked(ups, url) == HI


async def test_idle_connections_are_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool.UpstreamConnection, "idle_s", 0.05)
    async with serving([WHOLE], [WHOLE]) as (ups, server, url):
        await asked(ups, url)
        await until(lambda: server.hung_up == 1)
        assert await asked(ups, url) == HI
        assert server.connections == 2


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        *(
            (url, UpstreamError, "no address of a replica")
            for url in ("ftp://x/", "http://", "http://h:port/", "nonsense", "http://ü/ä")
        ),
        *(
            (url, OSError, r"address|no host")
            for url in (
                "http://" + "a" * 64 + "/",
                "http://a..b",
                "http://.",
                "http://h:99999",
                "http://[::1",
            )
        ),
        ("http://127.0.0.1:9/", ConnectionRefusedError, "."),
    ],
)
async def test_an_address_where_no_replica_is_is_an_error_of_the_connection(
    url: str, error: type[OSError], said: str
) -> None:
    with pytest.raises(error, match=said):
        await Upstream().post(url, b"{}", Receiver())


# ---- turns of one request that begin at one moment: one request, and each turn apart ----

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


async def answered(
    replicas: Sequence[StandInReplica], ask_for: dict[str, Any], **settings: object
) -> tuple[int, Any]:
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        rows = [entry(replica, f"own-{k}") for k, replica in enumerate(replicas)]
        served = calling(*rows, model_names=("*",), **settings)
        _, session = await stack.enter_async_context(served)
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
    status, answer = await answered([replica], body(prompts, samples), **settings)
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
    status, answer = await answered([replica], body(3))
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
        going = begin(session, body(4, 2, tokens=6), COMPLETIONS)
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
    status, answer = await answered([closed, free], body(6))
    assert (status, outputs(answer)) == (200, right(6))


async def test_what_one_turn_is_refused_for_is_said_of_it() -> None:
    replica = StandInReplica()
    replica.refuse_at = 1
    status, answer = await answered([replica], body(3))
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
