"""Choice of a session's gateway, and detection of gateways that stopped answering.

A session stays with one gateway as long as it answers, so that its prefixes stay known there.
`GatewayRing` uses rendezvous hashing: every process computes the same order from addresses and
session alone, and the sessions of a dead gateway spread over all others.

A dead process closes its connections; a frozen one, or a machine that is gone, only falls silent.
Turns wait for minutes, so `GatewayMonitor` asks each gateway with waiting turns for its health
meanwhile. One that misses `probes` of them in a row is dead, and its turns wait no longer.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b

import aiohttp

from rose.client.types import ClientSettings

REST_S = 2.0


class GatewayRing:
    """Addresses of all gateways and which of them failed lately. Times are monotonic seconds."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._resting_until_s: dict[str, float] = {}

    def order(self, key: str, now_s: float) -> list[str]:
        """All gateways in the order in which `key` should try them; those that rest come last."""
        if len(self._urls) == 1:
            return [*self._urls]
        by_weight = sorted(self._urls, key=lambda url: _weight(url, key), reverse=True)
        return sorted(by_weight, key=lambda url: self._resting_until_s.get(url, 0.0) > now_s)

    def failed(self, url: str, now_s: float) -> None:
        """A gateway did not answer: for `REST_S` the others are tried first."""
        self._resting_until_s[url] = now_s + REST_S

    def answered(self, url: str) -> None:
        """A gateway answered: it is as good as any."""
        self._resting_until_s.pop(url, None)


def _weight(url: str, key: str) -> bytes:
    return blake2b(f"{url}\0{key}".encode(), digest_size=8).digest()


class GatewayMonitor:
    """One prober for each gateway that somebody waits for."""

    def __init__(self, settings: ClientSettings, http: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._http = http
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._probers: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def watching(self, url: str) -> AsyncIterator[None]:
        """Raises TimeoutError inside as soon as the gateway counts as dead."""
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
        """End all probers."""
        probers = [*self._probers.values()]
        for prober in probers:
            prober.cancel()
        await asyncio.gather(*probers, return_exceptions=True)

    async def _probe(self, url: str) -> None:
        """Until nobody waits any more."""
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
