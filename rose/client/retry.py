"""One turn, tried at one gateway after the other until it is whole.

    try ── answer ─► done
     │  └─ refused (4xx) ─► error
     └─ no connection, silent gateway, broken answer, 429, 502, 503, 504
            └─► the next gateway at once; a pause when all of them failed; an error after `tries`

All tries carry the same request id: a gateway that knows it already hands out the same turn. Of
a stream only what is missing is asked for elsewhere: see `resume`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from rose.client import wire
from rose.client.errors import GatewayUnavailable
from rose.client.gateways import GatewayMonitor, GatewayRing
from rose.client.resume import AnotherTurnError, Received
from rose.client.stream import RunningTurn
from rose.client.types import ClientSettings, TokenChunk, Turn, TurnRequest
from rose.client.wire import events

T = TypeVar("T")
ChunkSink = Callable[[TokenChunk], Awaitable[None]]
_DEAD = (aiohttp.ClientError, OSError)


class _TryAgainError(Exception):
    """The gateway answered that it cannot now; `after_s` is its Retry-After."""

    def __init__(self, trouble: str, after_s: float = 0.0) -> None:
        super().__init__(trouble)
        self.after_s = after_s


class Tries:
    """Sends turns of one client."""

    def __init__(
        self,
        settings: ClientSettings,
        http: aiohttp.ClientSession,
        ring: GatewayRing,
        monitor: GatewayMonitor,
    ) -> None:
        self._settings = settings
        self._http = http
        self._ring = ring
        self._monitor = monitor

    async def whole(self, row: RunningTurn) -> Turn:
        """The turn as one answer."""
        body = wire.encode_ask(row.ask)

        async def ask(url: str) -> Turn:
            async with self._post(url, body, row.ask) as response:
                await _check(response)
                return wire.decode_turn(await response.read())

        return await self._until_done(row, ask, lambda: 0)

    async def streamed(self, row: RunningTurn, sink: ChunkSink) -> Turn:
        """The turn as a stream of chunks into `sink`, and whole at the end."""
        received = Received(row.ask)

        async def attempt(url: str, asked: TurnRequest) -> None:
            async with self._post(url, wire.encode_ask(asked, stream=True), asked) as response:
                await _check(response)
                await self._read(response, received, row, sink)
            if not received.whole:
                raise _TryAgainError("the stream ended without a finish reason")

        async def ask(url: str) -> Turn:
            try:
                await attempt(url, received.rest())
            except (*_DEAD, _TryAgainError):
                # A connection that broke is not a gateway that died: it may know the turn.
                if not received.whole:
                    if not received.answered:
                        raise
                    row.tries += 1
                    await attempt(url, received.again())
            return received.turn()

        return await self._until_done(row, ask, lambda: received.tokens)

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        received: Received,
        row: RunningTurn,
        sink: ChunkSink,
    ) -> None:
        async for event in events(response.content):
            for chunk in received.add(event):
                row.tokens = received.tokens
                await sink(chunk)
            if event.error is not None:
                if event.error.code in wire.RETRIED:
                    raise _TryAgainError(event.error.message)
                raise wire.refusal(event.error.code, event.error.message)

    def _post(
        self, url: str, body: bytes, ask: TurnRequest
    ) -> "aiohttp.client._RequestContextManager":
        return self._http.post(f"{url}{wire.GENERATE}", data=body, headers=wire.headers(ask))

    async def _until_done(
        self, row: RunningTurn, ask: Callable[[str], Awaitable[T]], got: Callable[[], int]
    ) -> T:
        """Ask gateway after gateway. A try that brought tokens starts the count anew."""
        loop, retry = asyncio.get_running_loop(), self._settings.retry
        tried, had, trouble = 0, got(), ""
        while tried < retry.tries:
            pause_s = 0.0
            for url in self._ring.order(row.ask.key, loop.time()):
                row.gateway, row.tries = url, row.tries + 1
                try:
                    async with self._monitor.watching(url):
                        done = await ask(url)
                except AnotherTurnError as error:
                    trouble = f"{url}: {error}"
                except _TryAgainError as again:
                    trouble, pause_s = f"{url}: {again}", max(pause_s, again.after_s)
                except _DEAD as error:
                    trouble = f"{url}: {type(error).__name__} {error}".strip()
                    self._ring.failed(url, loop.time())
                else:
                    self._ring.answered(url)
                    return done
            tried, had = (1, got()) if got() > had else (tried + 1, had)
            if tried < retry.tries:
                await asyncio.sleep(min(retry.max_s, max(pause_s, retry.pause_s(tried))))
        raise GatewayUnavailable(
            f"no gateway answered {row.ask.request_id} in {retry.tries} tries; {trouble}"
        )


async def _check(response: aiohttp.ClientResponse) -> None:
    """Return for a 200; else raise what follows from the status."""
    if response.status == 200:
        return
    text = wire.message(response.status, await response.read())
    if response.status in wire.RETRIED:
        after = response.headers.get("Retry-After", "")
        raise _TryAgainError(text, float(after) if after.isdigit() else 0.0)
    raise wire.refusal(response.status, text)
