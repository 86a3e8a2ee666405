"""Replica table from the command line: always leased; version and admission are polled.

A stock engine has neither: it takes turns while its `/health` answers, and its version is unknown.
"""

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from rose.contract.fields import UNVERSIONED
from rose.contract.replica import STATE, ReplicaState
from rose.errors import decoded
from rose.gateway.backends.probe import REPLICA_STATE, Probed, probe
from rose.gateway.replicas.table import ReplicaApi, ReplicaEntry, TableSink
from rose.gateway.settings import StaticReplica

POLL_S = 0.5
POLL_TIMEOUT = aiohttp.ClientTimeout(total=2.0)

# Takes a replica's kind, or, once, that it does not answer yet.
FoundSink = Callable[[StaticReplica, Probed | None], None]


class StaticTable:
    """Poller of each replica; one that does not answer is not healthy."""

    def __init__(
        self,
        replicas: tuple[StaticReplica, ...],
        session: aiohttp.ClientSession,
        on_found: FoundSink,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._on_found = on_found
        self._found: dict[str, ReplicaApi] = {}
        self._missed: set[str] = set()

    async def run(self, sink: TableSink) -> None:
        """Pass the table to `sink` on every change, until cancelled."""
        last: tuple[ReplicaEntry, ...] = ()
        while True:
            entries = tuple(await asyncio.gather(*map(self._poll, self._replicas)))
            if entries != last:
                sink(entries, ())
                last = entries
            await asyncio.sleep(POLL_S)

    async def _poll(self, replica: StaticReplica) -> ReplicaEntry:
        api = self._found.get(replica.id)
        if api is None:
            found = await probe(self._session, replica.url)
            if found is None:
                if replica.id not in self._missed:
                    self._missed.add(replica.id)
                    self._on_found(replica, None)
                # Its kind is unknown, so no turn can be sent to it.
                return _static_entry(replica, ReplicaApi.ROSE, False, 0, 0)
            api = self._found[replica.id] = found.api
            self._on_found(replica, found)
        if api is ReplicaApi.ROSE:
            state = await self._state(replica)
            if state is None:
                return _static_entry(replica, api, False, 0, 0)
            return _static_entry(
                replica, api, state.admitting, state.policy_version, state.kv_tokens
            )
        return _static_entry(replica, api, await self._healthy(replica), UNVERSIONED, 0)

    async def _state(self, replica: StaticReplica) -> ReplicaState | None:
        try:
            async with self._session.get(replica.url + STATE, timeout=POLL_TIMEOUT) as response:
                return (
                    decoded(REPLICA_STATE, await response.read())
                    if response.status == 200
                    else None
                )
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
            return None

    async def _healthy(self, replica: StaticReplica) -> bool:
        try:
            async with self._session.get(f"{replica.url}/health", timeout=POLL_TIMEOUT) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False


def _static_entry(
    replica: StaticReplica, api: ReplicaApi, healthy: bool, version: int, kv_tokens: int
) -> ReplicaEntry:
    return ReplicaEntry(
        id=replica.id,
        kind=replica.kind,
        url=replica.url,
        leased=True,
        lease_epoch=0,
        healthy=healthy,
        policy_version=version,
        max_sequences=replica.max_sequences,
        kv_tokens=kv_tokens,
        api=api,
    )
