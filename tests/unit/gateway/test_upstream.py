"""Connections to replicas, against bare sockets that do what servers do, and what they must not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from rose.gateway.backends import http_pool
from rose.gateway.backends.http_pool import Upstream, UpstreamError
from tests.harness.waiting import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nhi"
END = b"0\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Heard:
    """A receiver that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.over = asyncio.Event()

    def status(self, code: int) -> None:
        self.said.append(code)

    def body(self, data: bytes) -> None:
        self.said.append(data)

    def ended(self, error: Exception | None) -> None:
        self.said.append(error)
        self.over.set()


class Server:
    """Counts connections, and keeps the requests."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.connections = self.hung_up = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if not piece:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        self.hung_up += 1
        writer.close()


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[tuple[Upstream, Server]]:
    server, connections = Server([*answers]), Upstream()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate?x=1"
    try:
        yield connections, server
    finally:
        connections.close()
        listening.close()


async def asked(connections: Upstream, url: str, body: bytes = b"{}") -> list[object]:
    heard = Heard()
    connection = await connections.post(url, body, heard)
    async with asyncio.timeout(PATIENCE_S):
        await heard.over.wait()
    connection.leave(heard)
    return heard.said


async def test_pieces_are_handed_on_as_they_come_and_the_connection_is_kept() -> None:
    async with serving([CHUNKED, b"2\r\nab\r\n", b"1\r\nc\r\n" + END], [WHOLE]) as (ups, server):
        assert await asked(ups, server.url, b'{"a":1}') == [200, b"ab", b"c", None]
        assert await asked(ups, server.url) == [200, b"hi", None]
    assert server.connections == 1
    request = server.requests[0]
    assert request.startswith(b"POST /generate?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert request.endswith(b'Content-Length: 7\r\n\r\n{"a":1}')


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with serving([WHOLE], [WHOLE]) as (ups, server):
        answers = await asyncio.gather(asked(ups, server.url), asked(ups, server.url))
    assert answers == [[200, b"hi", None]] * 2
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "before"),
    [
        ([CHUNKED, b"2\r\nab\r\n", b""], [200, b"ab"]),
        ([b""], []),
        ([b"no HTTP at all\r\n\r\n"], []),
        ([CHUNKED, b"zz\r\n"], [200]),
        ([OK + b"Content-Length: 5\r\n\r\nab", b""], [200, b"ab"]),
    ],
)
async def test_an_answer_that_breaks_off_ends_with_an_error(
    answer: list[bytes], before: list[object]
) -> None:
    async with serving(answer, [WHOLE]) as (ups, server):
        *said, error = await asked(ups, server.url)
        assert said == before
        assert isinstance(error, UpstreamError)
        assert await asked(ups, server.url) == [200, b"hi", None]
    assert server.connections == 2


async def test_a_connection_that_its_replica_closes_is_not_used_again() -> None:
    closing = OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with serving([closing], [WHOLE, b""], [WHOLE]) as (ups, server):
        for _ in range(3):
            assert await asked(ups, server.url) == [200, b"hi", None]
            await asyncio.sleep(0.05)
    assert server.connections == 3


async def test_who_leaves_in_mid_answer_hangs_up_at_once() -> None:
    async with serving([CHUNKED, *[b"1\r\na\r\n"] * 200]) as (ups, server):
        heard = Heard()
        connection = await ups.post(server.url, b"{}", heard)
        while len(heard.said) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        connection.leave(heard)
        seen = len(heard.said)
        async with asyncio.timeout(PATIENCE_S):
            while not server.hung_up:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert len(heard.said) == seen
        assert None not in heard.said


@pytest.mark.parametrize(("rest", "connections"), [([END], 1), ([b"1\r\na\r\n"] * 60, 2)])
async def test_the_rest_of_an_answer_may_come_for_a_while(
    rest: list[bytes], connections: int
) -> None:
    async with serving([CHUNKED, b"2\r\nab\r\n", *rest], [WHOLE]) as (ups, server):
        heard = Heard()
        connection = await ups.post(server.url, b"{}", heard)
        while b"ab" not in heard.said:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        connection.leave(heard, 0.2)
        await asyncio.sleep(0.4)
        assert await asked(ups, server.url) == [200, b"hi", None]
        connection.leave(heard)
    assert heard.said[:2] == [200, b"ab"]
    assert server.connections == connections


async def test_a_receivers_error_ends_its_answer_and_no_other() -> None:
    class Clumsy(Heard):
        def body(self, data: bytes) -> None:
            raise KeyError(data)

    async with serving([WHOLE], [WHOLE]) as (ups, server):
        clumsy = Clumsy()
        await ups.post(server.url, b"{}", clumsy)
        await clumsy.over.wait()
        assert isinstance(clumsy.said[-1], KeyError)
        assert await asked(ups, server.url) == [200, b"hi", None]


async def test_idle_connections_are_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool.UpstreamConnection, "idle_s", 0.05)
    async with serving([WHOLE], [WHOLE]) as (ups, server):
        await asked(ups, server.url)
        async with asyncio.timeout(PATIENCE_S):
            while not server.hung_up:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await asked(ups, server.url) == [200, b"hi", None]
        assert server.connections == 2


@pytest.mark.parametrize("url", ["ftp://x/", "http://", "http://h:port/", "nonsense", "http://ü/ä"])
async def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    with pytest.raises(UpstreamError, match="no address of a replica"):
        await Upstream().post(url, b"{}", Heard())


async def test_nobody_there_is_a_refused_connection() -> None:
    with pytest.raises(ConnectionRefusedError):
        await Upstream().post("http://127.0.0.1:9/", b"{}", Heard())


@pytest.mark.parametrize(
    "url",
    ["http://" + "a" * 64 + "/", "http://a..b", "http://.", "http://h:99999", "http://[::1", "x"],
)
async def test_an_address_that_cannot_be_one_is_a_replica_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(OSError, match=r"address|no host"):
        await Upstream().post(url, b"{}", Heard())
