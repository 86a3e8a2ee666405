"""Relay: fetches weights for its neighbours and passes them on, with a scheduler or without."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from rose.errors import RoseError
from rose.publish.credentials import OPEN, Credentials
from rose.publish.hub import Hub
from rose.publish.reader import Reader
from rose.publish.receiving import Caps, Receiving
from rose.publish.server import VersionServer
from weight_transfer import ChunkStore, VerifyKey, WeightError
from weight_transfer.catalog import Catalog

LOOK_INTERVAL_S = 1.0


class Relay:
    """Store, hub and server of one member of a cluster.

    It learns the manifests that the origin publishes as they appear; chunks it fetches when the
    first neighbour asks, and keeps them. `members`: addresses of all members, this one among them.
    """

    def __init__(
        self,
        root: Path,
        origin: str,
        job: str,
        host: str,
        port: int,
        members: Iterable[str] = (),
        *,
        credentials: Credentials = OPEN,
        caps: Caps | None = None,
        verify_key: VerifyKey | None = None,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._origin = origin
        self._job = job
        self._verify_key = verify_key
        self._on_trouble = on_trouble
        self._session = credentials.session()
        self._reader = Reader(self._session, f"{host}:{port}")
        store = ChunkStore(root)
        me = f"{credentials.scheme}://{host}:{port}"
        self.hub = Hub(self._session, Receiving(store, caps or Caps()), me, members)
        self._server = VersionServer(store, port, hub=self.hub, credentials=credentials, host=host)
        self._known: set[tuple[int, bool]] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """How the other members reach it."""
        return self._server.url

    def enrol(self, members: Iterable[str]) -> None:
        """From now on these are the members."""
        self.hub.enrol(members)

    async def start(self) -> None:
        """Serve, and look for versions. ConfigError when it cannot."""
        await self._server.start()
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop; what came stays on disk."""
        if self._looking:
            self._looking.cancel()
        await self.hub.close()
        await self._server.close()
        self.hub.receiving.close()
        await self._session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _look(self) -> None:
        said = ""
        while True:
            try:
                await self._learn(await self._reader.catalog(self._origin))
                said = ""
            except (RoseError, WeightError) as error:
                if str(error) != said:
                    said = str(error)
                    self._on_trouble(said)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _learn(self, catalog: Catalog) -> None:
        listed = {(version, True) for version in catalog.bases}
        listed |= {(delta.version, False) for delta in catalog.deltas}
        for version, base in sorted(listed - self._known):
            await self.hub.manifest(self._job, version, self._origin, self._verify_key, base=base)
            self._known.add((version, base))
