"""A gateway in this process with a replica table that the test sets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import aiohttp

from elastic_scheduler import ReplicaKind
from rose.gateway import Gateway, GatewaySettings, ReplicaEntry
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S, until_async
from tests.unit.gateway.wire_cases import VLLM, ask


class TableGateway(Gateway):
    """Gateway whose table the test sets."""

    def _source(self) -> Any:
        return SimpleNamespace(run=lambda sink: asyncio.Event().wait())


def entry(replica: StandInReplica, name: str, **changes: object) -> ReplicaEntry:
    row = ReplicaEntry(
        id=name,
        kind=ReplicaKind.GUEST if name.startswith("guest") else ReplicaKind.DEDICATED,
        url=replica.url,
        leased=True,
        lease_epoch=1,
        healthy=True,
        policy_version=replica.version,
        max_sequences=64,
    )
    return replace(row, **changes)


@asynccontextmanager
async def gateway_with(*rows: ReplicaEntry, **settings: object) -> AsyncIterator[Gateway]:
    values = {"port": 0, "scheduler": "127.0.0.1:1", "shutdown_s": 0.1, **settings}
    async with TableGateway(GatewaySettings(**values)) as gateway:
        if rows:
            gateway.set_table(rows)
        yield gateway


def base_url(gateway: Gateway) -> str:
    return f"http://127.0.0.1:{gateway.port}"


@asynccontextmanager
async def calling(
    *rows: ReplicaEntry, **settings: object
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway with these replicas, and a session with it."""
    async with (
        gateway_with(*rows, **settings) as gateway,
        aiohttp.ClientSession(base_url(gateway)) as session,
    ):
        yield gateway, session


@asynccontextmanager
async def serving(
    replica: StandInReplica | None = None,
    name: str = "guest-0",
    row: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> AsyncIterator[tuple[StandInReplica, Gateway, aiohttp.ClientSession]]:
    """A replica, a gateway that has it alone, with changes of its `row`, and a session."""
    async with (
        replica or StandInReplica() as replica,
        calling(entry(replica, name, **row), **settings) as (gateway, session),
    ):
        yield replica, gateway, session


@asynccontextmanager
async def failing_over(
    first: StandInReplica | None = None, second: StandInReplica | None = None, **settings: object
) -> AsyncIterator[tuple[StandInReplica, StandInReplica, Gateway, aiohttp.ClientSession]]:
    """A guest on which turns begin, as it offers more, a replica that is there too, and a gateway
    with both.
    """
    async with first or StandInReplica() as guest, second or StandInReplica() as own:
        rows = entry(guest, "guest-0", decode_tok_s=9e5), entry(own, "own-0", decode_tok_s=1e3)
        async with calling(*rows, **settings) as (gateway, session):
            yield guest, own, gateway, session


def begin(session: aiohttp.ClientSession, body: object, path: str = VLLM) -> Any:
    """Return a task that asks for a turn; its result is status, answer and headers."""
    return asyncio.create_task(ask(session, path, body))


class Ticks:
    """Milliseconds in which this process's event loop came to run; a context manager.

    A machine that is busy with others makes them longer, not more: something took at most so many
    of them, or it was waited for.
    """

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> "Ticks":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.count += 1


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds."""
    await until_async(condition, PATIENCE_S, "the condition", every_s=0.005)
