"""Relay: fetches weights for its neighbours and passes them on, with a scheduler or without."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from rose.publish.credentials import OPEN, Credentials
from rose.publish.hub import Hub
from rose.publish.receiving import Caps, Receiving
from rose.publish.server import VersionServer
from weight_transfer import ChunkStore, VerifyKey


class Relay:
    """Store, hub and server of one member of a cluster.

    It fetches what the first neighbour asks for, and keeps it. `members`: addresses of all members,
    this one among them.
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
        verify_key: VerifyKey | None,
        credentials: Credentials = OPEN,
        caps: Caps | None = None,
        insecure: bool = False,
    ) -> None:
        """`verify_key`: of the job's trainer; None passes on what nobody signed.

        `insecure`: other machines may reach it without certificates. ConfigError without.
        """
        credentials.check_exposure(host, insecure=insecure)
        members = tuple(members)
        # Whoever configures this relay names them; no announcement does.
        credentials = credentials.naming((origin, *members))
        self._session = credentials.session()
        store = ChunkStore(root)
        me = f"{credentials.scheme}://{host}:{port}"
        self.hub = Hub(self._session, Receiving(store, caps or Caps()), me, members)
        self._server = VersionServer(
            store, port, hub=self.hub, credentials=credentials, host=host, insecure=insecure
        )
        self.hub.follow(job, origin, verify_key)

    @property
    def url(self) -> str:
        """How the other members reach it."""
        return self._server.url

    def enrol(self, members: Iterable[str]) -> None:
        """From now on these are the members."""
        self.hub.enrol(members)

    async def start(self) -> None:
        """Serve. ConfigError when it cannot."""
        await self._server.start()

    async def close(self) -> None:
        """Stop; what came stays on disk."""
        await self.hub.close()
        await self._server.close()
        self.hub.receiving.close()
        await self._session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
