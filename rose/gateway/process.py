"""A whole gateway in one event loop: table source, dispatcher, server."""

import asyncio
import errno
import secrets
import socket
import sys
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

from rose.errors import ConfigError
from rose.eventlog import EventLog
from rose.gateway.demand import DemandMeter
from rose.gateway.dispatcher import Dispatcher
from rose.gateway.model import ServedModel
from rose.gateway.probe import Probed
from rose.gateway.reporting import DemandReporter
from rose.gateway.server import GatewayServer
from rose.gateway.settings import GatewaySettings, StaticReplica
from rose.gateway.static import StaticTable
from rose.gateway.stats import GatewayStats
from rose.gateway.table import ReplicaApi, ReplicaEntry
from rose.gateway.text import TextCodec
from rose.gateway.upstream import Upstream
from rose.gateway.watch import WatchedTable

KEEPALIVE_S = 300.0
ENGINE_NAMES = {ReplicaApi.VLLM: "vLLM", ReplicaApi.SGLANG: "SGLang"}


class Gateway:
    """Async context manager around a listening gateway; `port` is the one it got."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._events = EventLog(settings.log_dir, "gateway") if settings.log_dir else None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = settings.port

    async def __aenter__(self) -> Self:
        settings, stats = self._settings, GatewayStats()
        codec = None if settings.tokenizer is None else TextCodec(settings.tokenizer)
        self._model = ServedModel(settings.model_name, settings.max_model_len, codec)
        # For probing; turns go over `upstream`.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._upstream = Upstream()
        clock = asyncio.get_running_loop().time
        self._dispatcher = Dispatcher(settings, stats, clock, self.note)
        self._server = GatewayServer(
            settings, self._dispatcher, self._upstream, stats, self.note, self._model
        )
        self._runner = web.AppRunner(
            self._server.application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
        )
        await self._runner.setup()
        try:
            await self._listen()
        except BaseException:
            await self._close_io()
            raise
        self._server.start()
        self._tasks.append(asyncio.create_task(self._source().run(self.set_table)))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_io()

    @property
    def live_turns(self) -> int:
        """Turns on replicas now."""
        return sum(self._dispatcher.live_turns().values())

    def set_table(self, entries: tuple[ReplicaEntry, ...]) -> None:
        """Take a new replica table."""
        self._dispatcher.set_table(entries)

    def note(self, event: str, **fields: object) -> None:
        """Write one event, where a log is wanted."""
        if self._events is not None:
            self._events.write(event, **fields)

    async def failed(self) -> None:
        """Return only when a background task ended, which none should; raises its error."""
        await asyncio.gather(*self._tasks)

    def _found(self, replica: StaticReplica, found: Probed | None) -> None:
        """A replica named on the command line answered for the first time, or not at first."""
        if found is None:
            _tell(f"{replica.url} does not answer yet: it is asked until it does")
            return
        if self._settings.max_model_len is None and found.max_model_len is not None:
            known = self._model.max_model_len or found.max_model_len
            self._model.max_model_len = min(known, found.max_model_len)
        self.note("replica_found", replica=replica.id, api=found.api.value)
        if found.api is not ReplicaApi.ROSE:
            _tell(
                f"{replica.id} is a stock {ENGINE_NAMES[found.api]}: "
                "its tokens carry no policy versions, and no gate holds it"
            )

    def _source(self) -> StaticTable | WatchedTable:
        settings = self._settings
        if settings.scheduler is None:
            return StaticTable(settings.replicas, self._session, self._found)
        name, clock = f"gateway:{self.port}", asyncio.get_running_loop().time
        # Of its own each time: what an earlier process reported must not count as this one's.
        own = f"{socket.gethostname()}:{self.port}/{secrets.token_hex(4)}"
        meter = DemandMeter(self._dispatcher, own, clock())
        reporter = DemandReporter(meter, self._dispatcher.work_began, clock, self.note)
        target, ttl_s = settings.scheduler, settings.table_ttl_s
        return WatchedTable(target, name, ttl_s, self.note, reporter=reporter)

    async def _listen(self) -> None:
        settings = self._settings
        site = web.TCPSite(self._runner, settings.host, settings.port, shutdown_timeout=1.0)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {settings.port} of {settings.host} is in use; give another --port"
                ) from error
            raise ConfigError(f"cannot listen on {settings.host}: {error.strerror}") from error
        self.port = self._runner.addresses[0][1]

    async def _close_io(self) -> None:
        await self._runner.cleanup()
        self._upstream.close()
        await self._session.close()
        if self._events is not None:
            self._events.close()


def _tell(what: str) -> None:
    sys.stdout.write(f"rose gateway: {what}\n")
    sys.stdout.flush()
