"""The weights' side of a node's network: what it fetches with, and what it passes on."""

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from rose.node.bringing import Source
from rose.node.chain import KnownVersion, VersionChain
from rose.node.config import NodeConfig
from rose.publish import Credentials, Hub, Reader, Receiving, VersionServer
from rose.publish.joining import Membership, join_group, lead
from rose.publish.muster import Lead
from weight_transfer import ChunkStore, VerifyKey

_log = logging.getLogger(__name__)


class WeightNetwork:
    """One node's connections for weights, and its relay where it has one.

    Raises ConfigError for credentials that cannot be used.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        leader = [config.fanout.leader] if config.fanout and config.fanout.leader else []
        self._credentials: Credentials = config.transport.credentials.naming(leader)
        if relay := config.relay:
            self._credentials.check_exposure(relay.host, insecure=relay.insecure)
        self._session: aiohttp.ClientSession | None = None
        self._server: VersionServer | None = None
        self._source: Source | None = None
        self._joining: asyncio.Task[None] | None = None

    @property
    def relay_url(self) -> str:
        """Where neighbours fetch from this node; empty when it relays nothing."""
        relay = self._config.relay
        return f"{self._credentials.scheme}://{relay.host}:{relay.port}" if relay else ""

    async def start(self, replicas: aiohttp.ClientSession, chain: VersionChain) -> Source:
        """Open it. `replicas`: the session to this node's own engines. ConfigError."""
        config = self._config
        self._session = self._credentials.session()
        store = ChunkStore(config.run_dir / "weights")
        hub = Hub(self._session, Receiving(store, config.receiver.caps), self.relay_url)
        group = config.fanout
        leading = lead(group.size) if group and group.rank == 0 else None
        if config.relay:
            self._server = VersionServer(
                store,
                config.relay.port,
                hub=hub,
                credentials=self._credentials,
                host=config.relay.host,
                lead=leading,
                insecure=config.relay.insecure,
            )
            await self._server.start()
        if group:
            mine = Membership(group.rank, group.size, group.leader, group.device)
            self._joining = asyncio.create_task(self._join(hub, mine, leading))
        key = VerifyKey(config.verify_key) if config.verify_key else None
        self._source = Source(replicas, hub, chain, key, Reader(self._session, config.node, key))
        return self._source

    def enrol(self, members: Sequence[str]) -> None:
        """Who relays in this cluster now."""
        if self._source:
            self._source.hub.enrol(members)

    def follow(self, known: KnownVersion) -> None:
        """Neighbours may ask for any part of a version, whether or not an engine here needs it."""
        if self._source:
            self._source.hub.follow(known.job, known.url, self._source.verify_key)

    async def _join(self, hub: Hub, mine: Membership, leading: Lead | None) -> None:
        """Weights come over HTTP until all members are there."""
        assert self._session is not None
        try:
            hub.group = await join_group(self._session, mine, leading)
        except Exception as error:  # noqa: BLE001 - whatever NCCL or a driver says: there is no group
            _log.warning("joins no group of GPUs, weights come over HTTP: %s", error)

    async def close(self) -> None:
        """Close all connections; what came stays on disk."""
        if self._joining:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._source:
            await self._source.hub.close()
            self._source.receiving.close()
        if self._server:
            await self._server.close()
        if self._session:
            await self._session.close()
