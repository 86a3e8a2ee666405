"""One turn, tried at one gateway after the other until it is whole.

    try ── answer ─► done
     │  └─ refused (4xx) ─► error
     └─ no connection, silent gateway, broken answer, 429, 502, 503, 504
            └─► the next gateway at once; a pause when all of them failed; an error after `tries`

All tries carry the same request id: a gateway that has the turn already returns the same one. A
stream is continued elsewhere from its received tokens: see `resume`.

A session stays with one gateway as long as it answers, so that its prefixes stay known there.
`GatewayRing` uses rendezvous hashing: every process computes the same order from addresses and
session alone, and the sessions of a dead gateway spread over all others.

A dead process closes its connections; a frozen one, or a machine that is gone, only falls silent.
Turns wait for minutes, so `GatewayMonitor` asks each gateway with waiting turns for its health
meanwhile. One that misses `probes` of them in a row is dead, and its turns wait no longer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import quote

import aiohttp
from msgspec import structs

from rose.client import wire
from rose.client.errors import GatewayUnavailable
from rose.client.resume import AnotherTurnError, Received
from rose.client.stream import RunningTurn
from rose.client.types import ClientSettings, ClientTurn, TokenChunk, Turn
from rose.client.wire import events
from rose.contract.gateway import (
    GENERATE,
    RETRIED,
    SESSIONS,
    VERSIONS,
    GatewayGenerateBody,
    ImageName,
    SessionTrajectory,
    Versions,
)
from rose.contract.replica import NO_IMAGE

REST_S = 2.0
GET_S = 5.0
MOST_HASHES = 16_384


class GatewayRing:
    """Order in which a client tries its gateways; recently failed ones come last.

    Times are monotonic seconds.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._resting_until_s: dict[str, float] = {}

    def order(self, key: str, now_s: float) -> list[str]:
        """Return all gateway addresses in the order to try for `key`, recently failed ones last.

        The order is by rendezvous hashing, so every process computes the same one.
        """
        if len(self._urls) == 1:
            return [*self._urls]
        by_weight = sorted(self._urls, key=lambda url: _weight(url, key), reverse=True)
        return sorted(by_weight, key=lambda url: self._resting_until_s.get(url, 0.0) > now_s)

    def failed(self, url: str, now_s: float) -> None:
        """Record that a gateway did not answer: for `REST_S` it comes last in every order."""
        self._resting_until_s[url] = now_s + REST_S

    def answered(self, url: str) -> None:
        """Record that a gateway answered: it no longer comes last."""
        self._resting_until_s.pop(url, None)


def _weight(url: str, key: str) -> bytes:
    return blake2b(f"{url}\0{key}".encode(), digest_size=8).digest()


class GatewayMonitor:
    """Health prober of the gateways that turns wait for, one task for each such gateway."""

    def __init__(self, settings: ClientSettings, http: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._http = http
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._probers: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def watching(self, url: str) -> AsyncIterator[None]:
        """Probe the gateway inside the context, and raise TimeoutError there once it is dead.

        A gateway is dead after `probes` health requests in a row without an answer.
        """
        async with asyncio.timeout(None) as wait:
            waits = self._waits.setdefault(url, set())
            waits.add(wait)
            if url not in self._probers:
                self._probers[url] = asyncio.create_task(self._probe(url))
            try:
                yield
            finally:
                waits.discard(wait)

    async def close(self) -> None:
        """Cancel all probing tasks and wait for their ends."""
        probers = [*self._probers.values()]
        for prober in probers:
            prober.cancel()
        await asyncio.gather(*probers, return_exceptions=True)

    async def _probe(self, url: str) -> None:
        """Probe the gateway until no turn waits for it; end the waits when it counts as dead."""
        try:
            missed = 0
            while self._waits[url]:
                await asyncio.sleep(self._settings.probe_s)
                missed = 0 if await self._answers(url) else missed + 1
                if missed >= self._settings.probes:
                    self._end_waits(url)
                    missed = 0
        finally:
            del self._probers[url]

    async def _answers(self, url: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_s)
        try:
            async with self._http.get(f"{url}/health", timeout=timeout):
                return True
        except Exception:  # noqa: BLE001 - whatever a probe ends with is no answer; turns wait for it
            return False

    def _end_waits(self, url: str) -> None:
        for wait in self._waits[url]:
            wait.reschedule(asyncio.get_running_loop().time())
        self._waits[url].clear()


T = TypeVar("T")
ChunkSink = Callable[[TokenChunk], Awaitable[None]]
_DEAD = (aiohttp.ClientError, OSError)


class _TryAgainError(Exception):
    """Error: the gateway is busy or its answer broke off; `after_s` is its Retry-After or 0."""

    def __init__(self, trouble: str, after_s: float = 0.0) -> None:
        super().__init__(trouble)
        self.after_s = after_s


class Tries:
    """Sender of one client's turns, which tries gateway after gateway until one answers."""

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
        # Hashes of images that each gateway was sent.
        self._sent: dict[str, set[str]] = {}

    async def whole(self, row: RunningTurn) -> Turn:
        """Request the turn as one answer, with retries, and return it.

        Raises GatewayUnavailable when all tries failed, or the error that a gateway's refusal
        means.
        """

        async def ask(url: str) -> Turn:
            body = self._encoded(url, row.ask, row.ask.body)
            async with self._post(url, body, row.ask) as response:
                await self._accepted(url, row.ask, response)
                return wire.decode_turn(await response.read(), wire.traced(response))

        return await self._until_done(row, ask, lambda: 0)

    async def versions(self, job: str) -> Versions:
        """Return the policy version of each replica, from the first gateway that answers.

        job: the job to report, "" for all. Raises GatewayUnavailable if no gateway answers, or the
        error that a refusal means.
        """
        loop, trouble = asyncio.get_running_loop(), ""
        for url in self._ring.order("", loop.time()):
            try:
                status, body = await self._got(url, VERSIONS, job)
            except _TryAgainError as error:
                trouble = str(error)
            else:
                return wire.decode_versions(status, body)
        raise GatewayUnavailable(f"no gateway says which versions are served; {trouble}")

    async def trajectories(self, session_id: str, job: str) -> tuple[SessionTrajectory, ...]:
        """Return the trajectories that the gateways keep of a session; a gateway that does not
        answer has none.

        Raises GatewayUnavailable if no gateway answers, or the error that a refusal means.
        """
        found: tuple[SessionTrajectory, ...] = ()
        trouble: list[str] = []
        urls = self._settings.urls
        for url in urls:
            try:
                status, body = await self._got(url, SESSIONS + quote(session_id), job)
                found += wire.decode_trajectories(status, body)
            except _TryAgainError as error:
                trouble.append(str(error))
        if len(trouble) == len(urls):
            raise GatewayUnavailable(f"no gateway says what it keeps; {trouble[-1]}")
        return found

    async def _got(self, url: str, path: str, job: str) -> tuple[int, bytes]:
        """Return status and body of a page of this gateway. Raises _TryAgainError if the gateway is
        busy or does not answer.
        """
        params, timeout = ({"job": job} if job else {}), aiohttp.ClientTimeout(total=GET_S)
        try:
            async with self._http.get(url + path, params=params, timeout=timeout) as response:
                body = await response.read()
        except _DEAD as error:
            self._ring.failed(url, asyncio.get_running_loop().time())
            raise _TryAgainError(f"{url}: {type(error).__name__} {error}".strip()) from error
        if response.status in RETRIED:
            raise _TryAgainError(f"{url}: {wire.message(response.status, body)}")
        return response.status, body

    async def streamed(self, row: RunningTurn, sink: ChunkSink) -> Turn:
        """Request the turn as a stream, pass each chunk to `sink`, and return the whole turn.

        Raises GatewayUnavailable when all tries failed, or the error that a gateway's refusal
        means.
        """
        received = Received(row.ask)

        async def attempt(url: str, asked: ClientTurn) -> None:
            body = self._encoded(url, asked, structs.replace(asked.body, stream=True))
            async with self._post(url, body, asked) as response:
                await self._accepted(url, asked, response)
                received.trace_id = wire.traced(response)
                await self._read(response, received, row, sink)
            if not received.whole:
                raise _TryAgainError("the stream ended without a finish reason")

        async def ask(url: str) -> Turn:
            try:
                await attempt(url, received.rest())
            except (*_DEAD, _TryAgainError):
                # A broken connection does not mean a dead gateway: it may have the turn.
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
                if event.error.code in RETRIED:
                    raise _TryAgainError(event.error.message)
                raise wire.refusal(event.error.code, event.error.message)

    def _encoded(self, url: str, ask: ClientTurn, body: GatewayGenerateBody) -> bytes:
        """Return the request with the turn's images: by their hashes those that the gateway was
        sent, as bytes the others.
        """
        if not ask.images:
            return wire.encode(body)
        sent = self._sent.get(url, ())
        images = [
            ImageName(each.sha256) if each.sha256 in sent else each.data for each in ask.images
        ]
        return wire.encode(structs.replace(body, images=tuple(images)))

    async def _accepted(self, url: str, ask: ClientTurn, response: aiohttp.ClientResponse) -> None:
        """Return for status 200, else raise as `_check` does; record what the gateway has now."""
        if response.status == NO_IMAGE:
            # A gateway that was started anew, or dropped some: the next try has their bytes.
            self._sent.pop(url, None)
            raise _TryAgainError(wire.message(response.status, await response.read()))
        await _check(response)
        if ask.images:
            sent = self._sent.setdefault(url, set())
            if len(sent) > MOST_HASHES:
                sent.clear()
            sent.update(image.sha256 for image in ask.images)

    def _post(
        self, url: str, body: bytes, ask: ClientTurn
    ) -> "aiohttp.client._RequestContextManager":
        return self._http.post(f"{url}{GENERATE}", data=body, headers=wire.headers(ask))

    async def _until_done(
        self, row: RunningTurn, ask: Callable[[str], Awaitable[T]], got: Callable[[], int]
    ) -> T:
        """Await `ask(url)` for gateway after gateway until one call returns, and return its result.

        got: returns the number of received tokens; a round of tries that brought new ones starts
        the count of tries anew. Raises GatewayUnavailable after `tries` rounds without one.
        """
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
    """Return for status 200, else raise: _TryAgainError if busy, or the status's own error."""
    if response.status == 200:
        return
    text = wire.message(response.status, await response.read())
    if response.status in RETRIED:
        after = response.headers.get("Retry-After", "")
        raise _TryAgainError(text, float(after) if after.isdigit() else 0.0)
    raise wire.refusal(response.status, text)
