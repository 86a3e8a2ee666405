"""A whole gateway in one event loop: table source, dispatcher, server."""

import asyncio
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from rose.gateway.backends.http_pool import ClusterTls, Upstream
from rose.gateway.batch_jobs.folder import BatchFolder
from rose.gateway.demand import DemandMeter, DemandReporter
from rose.gateway.http_requests import Authenticator
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.replicas.jobs import JobVersions
from rose.gateway.replicas.static import Probed, StaticTable
from rose.gateway.replicas.table import ReplicaApi, ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.gateway.server import GatewayServer
from rose.gateway.settings import ANY_MODEL, DEFAULT_MODEL, GatewaySettings, StaticReplica
from rose.gateway.stats import GatewayHealth, GatewayStats, GatewayStatus
from rose.gateway.text_codec import ServedModel, TextCodec, TextLimits
from rose.logs.eventlog import Logs
from rose.logs.process_log import announce
from rose.otlp import export_metrics
from rose.process.background_tasks import Background
from rose.process.http_port import HttpPort
from rose.security.audit_log import AuditLog, audit_file
from rose.security.tokens import TokenVerifier
from rose.tracing import spans_of

ENGINE_NAMES = {ReplicaApi.VLLM: "vLLM", ReplicaApi.SGLANG: "SGLang"}


class Gateway:
    """Async context manager that runs a whole gateway in this event loop; `port` is the port that
    it bound.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._logs = Logs(settings.log_dir, settings.log_limits) if settings.log_dir else None
        self._events = self._logs.events("gateway") if self._logs else None
        self._codec: TextCodec | None = None
        self._stats = GatewayStats()
        self.background = Background(self.note)
        self.port = settings.port
        self._audit: AuditLog | None = None
        self._authenticator = self._asking()
        at = settings.batch_dir
        self._batch_folder = BatchFolder(at, settings.batch_bytes) if at else None

    async def __aenter__(self) -> Self:
        settings, stats = self._settings, self._stats
        self._codec = self._load_codec()
        name, *aliases = [each for each in settings.model_names if each != ANY_MODEL] or [
            DEFAULT_MODEL
        ]
        self._model = ServedModel(
            name,
            settings.max_model_len,
            self._codec,
            tuple(aliases),
            any_name=ANY_MODEL in settings.model_names,
        )
        # Probes use this session; turns use `upstream`.
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._upstream = Upstream(self._cluster_tls())
        clock = asyncio.get_running_loop().time
        self._dispatcher = Dispatcher(settings, stats, clock, self._note_aloud)
        self._server = GatewayServer(
            self._dispatcher,
            self._upstream,
            self._model,
            self._health,
            self._authenticator,
            spans_of("rose-gateway"),
            self._batch_folder,
        )
        certificates = settings.certificates
        self._listening = HttpPort(
            self._server.application(),
            settings.host,
            settings.port,
            certificates.server_context(everybody=True) if certificates else None,
            connections=self._server.connections,
            around=self._server.answer,
        )
        try:
            await self._listening.start()
            self.port = self._listening.port
        except BaseException:
            await self._close_io()
            raise
        if self._codec is not None:
            self._codec.start()
        self.background.start("sweep", self._server.sweep)
        self.background.start("loop_lag", stats.loop_lag.watch)
        if self._server.batches is not None:
            self.background.start("batches", self._server.batches.run)
        export_metrics("rose-gateway", self._server.metrics_text, text_string_to_metric_families)
        source = self._source()
        self.background.start("table", lambda: source.run(self.set_table))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        await self.background.close()
        await self._close_io()

    def flush_logs(self) -> bool:
        """Wait until all events are on disk and return True; return False if that takes too long.
        It blocks, so never call it in the event loop.
        """
        return self._logs is None or self._logs.flush()

    def set_table(self, entries: tuple[ReplicaEntry, ...], jobs: tuple[str, ...] = ()) -> None:
        """Replace the replica table and the registered jobs; no jobs means unknown ones."""
        self._dispatcher.set_table(entries, jobs)

    @property
    def stats(self) -> GatewayStats:
        """Counters of the running gateway since its start; `/rose/v1/stats` shows a copy."""
        return self._stats

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher of the gateway's turns: replica table, routers and queue."""
        return self._dispatcher

    def status(self) -> GatewayStatus:
        """Return a snapshot of the numbers of turns, replicas and sessions now."""
        return self._server.status()

    def _note_aloud(self, event: str, **fields: object) -> None:
        """Write one event to the log; print a reached limit to standard output as well."""
        self.note(event, **fields)
        if event.startswith("limit_"):
            option = f"--{fields['limit']}".replace("_", "-").replace("--descriptors", "ulimit -n")
            announce("rose gateway", f"{event}: {option}, {fields['times']} times")

    def note(self, event: str, **fields: object) -> None:
        """Write one event with these fields to the gateway's log, if it has one."""
        if self._events is not None:
            self._events.write(event, **fields)

    async def failed(self) -> None:
        """Wait until a background task has failed for good, and raise its RoseError."""
        await self.background.failed()

    def _health(self) -> GatewayHealth:
        logs = self._logs
        certificates = self._settings.certificates
        troubles = [
            *self.background.troubles(),
            *(logs.troubles() if logs else []),
            *(certificates.troubles() if certificates else []),
            *(self._audit.troubles() if self._audit else []),
        ]
        return GatewayHealth(
            troubles,
            logs.dropped if logs else 0,
            self.background.restarted(),
            certificates.validity_s if certificates else None,
        )

    def _asking(self) -> Authenticator:
        """Return the authenticator of callers. Raises ConfigError for token keys that cannot be
        used.
        """
        settings = self._settings
        tokens = None
        if settings.token_keys is not None:
            tokens = TokenVerifier(settings.token_keys, settings.token_audience)
        if settings.log_dir and (tokens or settings.certificates):
            self._audit = AuditLog(audit_file(settings.log_dir, "gateway"), "gateway")
        return Authenticator(settings.certificates, tokens, time.time, self._refused)

    def _cluster_tls(self) -> ClusterTls | None:
        """Return the TLS settings for replicas of a scheduler's cluster; None without a scheduler
        or certificates, since replicas of the command line may be foreign.
        """
        settings = self._settings
        if settings.scheduler is None or settings.certificates is None:
            return None
        return ClusterTls(settings.certificates)

    def _refused(self, event: str, **fields: object) -> None:
        self.note(event, **fields)
        if self._audit is not None:
            self._audit.write(event, fields)

    def _load_codec(self) -> TextCodec | None:
        settings = self._settings
        if settings.tokenizer is None:
            return None
        limits = TextLimits(settings.text_timeout_s, settings.max_prompt_chars)
        return TextCodec(settings.tokenizer, limits, self.note, settings.tool_call_parser)

    def _found(self, replica: StaticReplica, found: Probed | None) -> None:
        """Record and print that a replica of the command line answered for the first time, or does
        not answer yet.
        """
        if found is None:
            announce(
                "rose gateway", f"{replica.url} does not answer yet: it is asked until it does"
            )
            return
        if self._settings.max_model_len is None and found.max_model_len is not None:
            known = self._model.max_model_len or found.max_model_len
            self._model.max_model_len = min(known, found.max_model_len)
        self.note("replica_found", replica=replica.id, api=found.api.value)
        if found.api is not ReplicaApi.ROSE:
            announce(
                "rose gateway",
                f"{replica.id} is a stock {ENGINE_NAMES[found.api]}: "
                "its tokens carry no policy versions, and no gate holds it",
            )

    def _source(self) -> StaticTable | WatchedTable:
        settings = self._settings
        if settings.scheduler is None:
            return StaticTable(settings.replicas, self._session, self._found)
        clock = asyncio.get_running_loop().time
        name = f"{socket.gethostname()}:{self.port}"
        if settings.certificates is not None:
            name = settings.certificates.identity.name
        # The name is new for each process: reports of an earlier process must not count as this
        # one's.
        own = f"{name}/{secrets.token_hex(4)}"
        meter = DemandMeter(self._dispatcher, own, clock())
        reporter = DemandReporter(meter, self._dispatcher.work_began, clock)
        target, ttl_s = settings.scheduler, settings.table_ttl_s
        certificates = settings.certificates
        return WatchedTable(
            target,
            name,
            ttl_s,
            self.note,
            reporter=reporter,
            certificates=certificates,
            on_versions=self._set_announced,
        )

    def _set_announced(self, announced: Mapping[str, JobVersions]) -> None:
        self._dispatcher.default_versions.announced = announced

    async def _close_io(self) -> None:
        await self._listening.close()
        self._upstream.close()
        await self._session.close()
        if self._codec is not None:
            await self._codec.close()
        if self._logs is not None:
            await asyncio.to_thread(self._logs.close)
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)
