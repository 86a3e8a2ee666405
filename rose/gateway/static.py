"""Replica table from the command line: always leased; version and admission are polled."""

import asyncio

import aiohttp
import msgspec

from rose.gateway import wire
from rose.gateway.settings import StaticReplica
from rose.gateway.table import ReplicaEntry, TableSink

POLL_S = 0.5
POLL_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class StaticTable:
    """Polls each replica's `/rose/v1/state`; one that does not answer is not healthy."""

    def __init__(self, replicas: tuple[StaticReplica, ...], session: aiohttp.ClientSession) -> None:
        self._replicas = replicas
        self._session = session

    async def run(self, sink: TableSink) -> None:
        """Hand the table to `sink` on every change, until cancelled."""
        last: tuple[ReplicaEntry, ...] = ()
        while True:
            entries = tuple(await asyncio.gather(*map(self._poll, self._replicas)))
            if entries != last:
                sink(entries)
                last = entries
            await asyncio.sleep(POLL_S)

    async def _poll(self, replica: StaticReplica) -> ReplicaEntry:
        healthy, version = False, 0
        url = f"{replica.url}/rose/v1/state"
        try:
            async with self._session.get(url, timeout=POLL_TIMEOUT) as response:
                if response.status == 200:
                    state = wire.decode_state(await response.read())
                    healthy, version = state.admitting, state.policy_version
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
            healthy = False
        return ReplicaEntry(
            id=replica.id,
            kind=replica.kind,
            url=replica.url,
            leased=True,
            lease_epoch=0,
            healthy=healthy,
            policy_version=version,
            max_sequences=replica.max_sequences,
        )
