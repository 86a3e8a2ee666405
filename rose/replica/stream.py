"""One turn as a stream of NDJSON lines, written straight to the ASGI server."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from rose.replica.turns import TurnRunner
from rose.replica.wire import Chunk, Finish, line

if TYPE_CHECKING:
    from rose.replica.wire import GenerateBody

_HEADERS = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class TurnStream:
    """ASGI response of `POST /rose/v1/generate`. A client that goes away ends its turn."""

    def __init__(self, runner: TurnRunner, body: "GenerateBody") -> None:
        self._runner = runner
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not writing.done():
                writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing

    async def _write(self, send: Send) -> None:
        async for record in self._runner.run(self._body):
            await _send_line(send, record, last=isinstance(record, Finish))


async def _send_line(send: Send, record: Chunk | Finish, last: bool) -> None:
    message: dict[str, Any] = {
        "type": "http.response.body",
        "body": line(record),
        "more_body": not last,
    }
    await send(message)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
