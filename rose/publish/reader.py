"""What a reader says to a publisher: what is there, and that it may still ask for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rose.publish import index
from rose.publish.download import FetchError
from weight_transfer.catalog import Catalog

LEASE_TTL_S = 60.0
_CALL = aiohttp.ClientTimeout(total=10.0)
_MOST_BYTES = 16 << 20


class Reader:
    """A node as its publishers know it. `name`: unique among all readers."""

    def __init__(self, session: aiohttp.ClientSession, name: str) -> None:
        self._session = session
        self._name = name

    async def catalog(self, url: str) -> Catalog:
        """What is published; raises FetchError, IndexFormatError."""
        try:
            async with self._session.get(
                f"{url}/catalog", timeout=_CALL, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise FetchError(f"{url}/catalog: HTTP {response.status}")
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > _MOST_BYTES:
                        raise FetchError(f"{url}/catalog is longer than {_MOST_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FetchError(f"{url}/catalog cannot be fetched: {error!r}") from error
        return index.read(bytes(raw))

    @asynccontextmanager
    async def lease(self, url: str, part: str, version: int) -> AsyncIterator[None]:
        """Within the block nothing after `version` is collected there, where the publisher knows
        leases and can be reached. `part`: which of this node's replicas reads.
        """
        asked = {"reader": f"{self._name}/{part}", "version": version, "ttl_s": LEASE_TTL_S}
        await self._take(url, asked)
        renewing = asyncio.create_task(self._renew(url, asked))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, url: str, asked: dict[str, object]) -> None:
        while True:
            await asyncio.sleep(LEASE_TTL_S / 3)
            await self._take(url, asked)

    async def _take(self, url: str, asked: dict[str, object]) -> None:
        # Without a lease nothing is wrong yet: what is gone is said by the fetch.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                f"{url}/leases", json=asked, timeout=_CALL, allow_redirects=False
            ):
                pass
