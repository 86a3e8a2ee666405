"""What a reader says to a publisher: what is there, and that it may still ask for it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rose.publish import index
from rose.publish.download import ATTEMPT_FAILURES, FetchError
from weight_transfer import VerifyKey
from weight_transfer.catalog import Catalog

LEASE_TTL_S = 60.0
_CALL = aiohttp.ClientTimeout(total=10.0)
_log = logging.getLogger(__name__)


class Reader:
    """A node as its publishers know it. `name`: unique among all readers."""

    def __init__(
        self, session: aiohttp.ClientSession, name: str, verify_key: VerifyKey | None = None
    ) -> None:
        """`verify_key`: of the job's trainer; without it signatures are not asked for."""
        self._session = session
        self._name = name
        self._verify_key = verify_key

    async def catalog(self, url: str, job: str) -> Catalog:
        """What is published of a job; raises FetchError, IndexFormatError."""
        try:
            raw = await self._raw(f"{url}/catalog")
        except ATTEMPT_FAILURES as error:
            raise FetchError(f"{url}/catalog cannot be fetched: {error!r:.200}") from error
        return index.read(raw, job, self._verify_key, time.time())

    async def _raw(self, url: str) -> bytes:
        raw = bytearray()
        async with self._session.get(url, timeout=_CALL, allow_redirects=False) as response:
            if response.status != 200:
                raise FetchError(f"{url}: HTTP {response.status}")
            async for part in response.content.iter_any():
                raw += part
                if len(raw) > index.MAX_CATALOG_BYTES:
                    raise FetchError(f"{url} is longer than {index.MAX_CATALOG_BYTES} bytes")
        return bytes(raw)

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
        """Ask once. Without a lease nothing is wrong yet: what is gone is said by the fetch."""
        try:
            async with self._session.post(
                f"{url}/leases", json=asked, timeout=_CALL, allow_redirects=False
            ):
                pass
        except ATTEMPT_FAILURES:
            pass  # It is asked again in a third of the lease's time.
        except Exception as error:  # noqa: BLE001 - whatever an announced address makes a client raise
            _log.warning("%s takes no lease: %s: %.200s", url, type(error).__name__, error)
