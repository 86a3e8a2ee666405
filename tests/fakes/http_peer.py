"""Ends of an HTTP/1.1 connection without HTTP behind them: a scripted server, a noting receiver."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from rose.contract.replica import StreamLine
from tests.harness.waiting import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nhi"
CLOSING = OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi"
END = b"0\r\n\r\n"

# Pieces with a pause after each, of which an empty one closes the connection; or a writer of them.
Answer = Sequence[bytes] | Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedServer:
    """Server that answers each request by the next of its answers, and keeps the requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = [*answers]
        self.requests: list[bytes] = []
        # Connections that came, and those of them that the client closed.
        self.connections = self.hung_up = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self._answer(writer, self.answers.pop(0))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up += 1
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if callable(answer):
            return await answer(writer)
        for piece in answer:
            if not piece:
                return writer.close()
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return None


class Receiver:
    """Receiver of one response: records its status, its pieces and its end, in order."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._over = asyncio.Event()

    @property
    def code(self) -> int:
        return next((each for each in self.said if isinstance(each, int)), 0)

    @property
    def text(self) -> bytes:
        return b"".join(each for each in self.said if isinstance(each, bytes))

    @property
    def ends(self) -> list[object]:
        """Errors of the response's ends; None stands for a complete response."""
        return [each for each in self.said if each is None or isinstance(each, Exception)]

    def status(self, code: int) -> None:
        self.said.append(code)

    def body(self, data: bytes) -> None:
        self.said.append(data)

    def lines(self, lines: Sequence[StreamLine]) -> None:
        for line in lines:
            self.tokens += line.token_ids
            self.finish = line.finish_reason or self.finish

    def ended(self, error: Exception | None) -> None:
        self.said.append(error)
        self._over.set()

    async def over(self) -> Self:
        """Wait for the response's end."""
        async with asyncio.timeout(PATIENCE_S):
            await self._over.wait()
        return self
