"""HTTP server of a store's versions: `VersionRoutes` behind a port, a token and certificates."""

import contextlib
from hmac import compare_digest

from aiohttp import web

from rose.addresses import PATIENCE_S, host_port
from rose.errors import ConfigError
from rose.process.http_port import HttpPort
from rose.security.certificates import peer_over
from rose.security.roles import WEIGHT_READERS
from rose.weight_distribution.credentials import OPEN, Credentials
from weight_transfer import ChunkStore
from weight_transfer.catalog import ReadLeases
from weight_transfer.fetch import ChunkFetcher
from weight_transfer.fetch.nccl import GroupLead
from weight_transfer.serve import Signer, VersionRoutes

# Seconds in which replies that are being sent may end at shutdown.
SHUTDOWN_S = 60.0


class VersionServer(VersionRoutes):
    """HTTP server of a chunk store's versions at `host`:`port`.

    credentials: token and certificates that callers must show.
    """

    def __init__(
        self,
        store: ChunkStore,
        port: int,
        fetcher: ChunkFetcher | None = None,
        credentials: Credentials = OPEN,
        host: str = "127.0.0.1",
        leases: ReadLeases | None = None,
        lead: GroupLead | None = None,
        signer: Signer | None = None,
    ) -> None:
        """Prepare a server.

        Raise ConfigError if other machines can reach it without certificates.
        """
        credentials.check_exposure(host)
        super().__init__(store, self._check_caller, fetcher, leases, lead, signer)
        self._host = host
        self._port = port
        self._credentials = credentials
        self._listening: HttpPort | None = None

    @property
    def url(self) -> str:
        return f"{self._credentials.scheme}://{host_port(self._host, self._port)}"

    async def start(self) -> None:
        """Bind the port and serve.

        Raises ConfigError when the port stays taken or a certificate is bad.
        """
        port = HttpPort(
            self.app(),
            self._host,
            self._port,
            self._credentials.server(),
            patience_s=PATIENCE_S,
            shutdown_s=SHUTDOWN_S,
        )
        at = host_port(self._host, self._port)
        await port.start(f"{at} (weights) cannot be served: {{}}; choose another")
        self._listening = port

    async def close(self) -> None:
        if self._listening:
            await self._listening.close()
            self._listening = None

    def _check_caller(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        token = self._credentials.token
        # Bytes that are no UTF-8 come as surrogates, which are to be compared as well.
        shown = given.encode("utf-8", "surrogateescape")
        if token and not compare_digest(shown, f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(text="bear the token of this cluster")
        # The CA has signed the certificate; in clusters without roles it names none.
        with contextlib.suppress(ConfigError):
            peer = peer_over(request.transport)
            if peer is not None and peer.identity.role not in WEIGHT_READERS:
                raise web.HTTPForbidden(text=f"{peer.identity} has no use for weights")
