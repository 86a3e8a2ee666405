"""Connections to replicas, against bare sockets that do what servers do, and what they must not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gateway_cases import until

from rose.gateway.backends import http_pool
from rose.gateway.backends.http_pool import Upstream, UpstreamError
from tests.fakes.http_peer import CHUNKED, CLOSING, END, OK, WHOLE, Receiver, ScriptedServer, chunk

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
