"""Notices a gateway that stopped answering while turns wait for it.

A dead process closes its connections; a frozen one, or a machine that is gone, only falls silent.
Turns wait for minutes, so each gateway with waiting turns is asked for its health meanwhile, and
one that misses `probes` of them in a row ends the waiting.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rose.client.settings import ClientSettings


class Pulse:
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
