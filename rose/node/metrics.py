"""Metrics of a node: `/metrics` on threads of its own, so that a stuck daemon still serves it.

Gauges are read from the node's state at the moment of the scrape. `ReplicaPoller` asks an engine
without a control page for its figures now and then. A host's metrics are under its name, and go
with it; a host that the node's file names has the name "", which to Prometheus is no label at all.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from bisect import bisect_left
from collections import Counter as Tallied
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from socketserver import ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from executor import Grant, GrantMode, GuestState, HostState
from executor.control_page.page import LAYOUT_VERSION
from executor.kv.reclaim_ladder import ReclaimLevel, ReclaimOutcome
from rose.addresses import bound
from rose.errors import ConfigError, UnavailableError
from rose.metrics_server import certificate_families, damaged_files_family
from rose.node.guest.memory_gauges import HeldMemory
from rose.node.replica_client import ReplicaClient
from rose.release import release

INTERVAL_S = 1.0
# Events of the log that record refused weights, and the kind of what was refused.
REJECTIONS = {
    "chunk_rejected": "chunk",
    "version_refused": "version",
    "quarantined": "engine",
    "signature_refused": "signature",
}
FROZEN_MODES = ("freeze", "drain", "kill")
PAUSE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RECLAIM_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
# Bucket bounds as shares of the target; 1.0 makes attainment a bucket of its own.
LADDER: Final = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
# Seconds for which a silent caller may hold a thread.
PATIENCE_S: Final = 10.0
_NS = 1e9


class ReplicaPoller:
    """Poller of an engine without a control page: every second it stores the engine's running and
    waiting turns and its token count in `state`, zeros without an answer.
    """

    def __init__(self, client: ReplicaClient, is_up: Callable[[], bool]) -> None:
        self.state = GuestState()
        self._client = client
        self._is_up = is_up

    async def run(self) -> None:
        while True:
            state = GuestState()
            # The poll is telemetry only: calls of the lease agent decide if the engine obeys.
            with contextlib.suppress(UnavailableError):
                if self._is_up():
                    said = await self._client.state()
                    state = GuestState(
                        running=said.running,
                        waiting=said.waiting,
                        tokens_total=said.tokens_total,
                    )
            self.state = state
            await asyncio.sleep(INTERVAL_S)


class LatencyHistogram:
    """Histogram of one host's request latencies, with buckets at multiples of its target.

    One thread calls `observe`; a reader in another may see a request in the sum and not yet in the
    counts.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.sum_s = 0.0
        self._bounds_s = [target_s * share for share in LADDER]
        self._counts = [0] * (len(LADDER) + 1)

    def observe(self, seconds: float) -> None:
        """Add one request's latency, in seconds, to the histogram."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound in seconds as text, number of requests up to it), cumulative and
        ending at "+Inf", as Prometheus has them.
        """
        bounds = [floatToGoString(each) for each in (*self._bounds_s, float("inf"))]  # type: ignore[no-untyped-call]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Figures of one host at a scrape; `state` is None if the host publishes none.

    requests: counts of requests that met both targets, and that missed one. engine: its name with
    its version, and ROSE's support of it (`tested`, `probed` or `refused`), empty if unknown.
    lacks: what the host was asked for and cannot, as `capability: reason`. gpus: number of its
    GPUs.
    """

    name: str
    ttft: LatencyHistogram
    tpot: LatencyHistogram
    state: HostState | None = None
    requests: tuple[int, int] = (0, 0)
    engine: tuple[str, str] = ("", "")
    lacks: tuple[str, ...] = ()
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Figures of one replica at a scrape; a replica without a control page has no grant or guest
    state.

    duty: share of the last second in which it ran. granted: number of grants written. owed_bytes:
    KV bytes that its host took back and it still keeps. held: all memory that it holds. reclaim_s:
    seconds that a reclaim may take. host: name of the host that a guest is beside. ranks: number
    of its ranks.
    """

    name: str
    state: str
    restarts: int
    policy_version: int
    duty: float = 1.0
    granted: int = 0
    grant: Grant | None = None
    guest: GuestState | None = None
    owed_bytes: int = 0
    held: HeldMemory | None = None
    reclaim_s: float | None = None
    host: str = ""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Health of the daemon at a scrape.

    dropped: log records lost to a full queue. restarted, running: number of restarts, and True if
    it runs, by background task. killed: True if the kill switch is set. cut_off_s: seconds without
    a scheduler, 0 while one is connected. certificate: Unix times at which its certificate begins
    and ends. hosts: number of hosts by kind: `guarded` has a guest, `watched` has none, `refused`
    is a page that cannot be used.
    """

    dropped: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, bool] = field(default_factory=dict)
    killed: bool = False
    cut_off_s: float = 0.0
    certificate: tuple[float, float] | None = None
    damaged_files: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)


Family = CounterMetricFamily | GaugeMetricFamily
# A metric without its prefix `rose_`, the values of its labels, and its own value.
Sample = tuple[str, Sequence[str], float]


def _families(kind: type[Family], labels: str, **helps: str) -> dict[str, Callable[[], Family]]:
    return {
        name: partial(kind, f"rose_{name}", what, labels=labels.split())
        for name, what in helps.items()
    }


_gauges = partial(_families, GaugeMetricFamily)
_counters = partial(_families, CounterMetricFamily)
# Families of the gauges and counters that are read at a scrape, by name without `rose_`.
READ: Final = {
    **_gauges(
        "replica mode reason",
        guest_mode="1 for the mode of the guest's grant, with its reason; 0 for the others.",
    ),
    # Queries join guests with their hosts by this.
    **_gauges("replica host", guest_host_info="1, with the host that the guest is beside."),
    **_gauges(
        "replica",
        guest_duty="Share of the last second in which the guest made steps and was not held back.",
        grant_epoch="Epoch of the guest's grant; it grows with every mode.",
        guest_owed_bytes="KV memory that the host took back and the guest still keeps.",
        guest_running="Turns that run in the guest.",
        guest_waiting="Turns that wait in the guest.",
        guest_last_step_seconds="How long the guest's last step took.",
        guest_kv_bytes="KV memory that the guest has mapped.",
        replica_ranks="Ranks of the engine, each on a GPU of its own if it has any.",
        policy_version="Version of its job's weights that the replica has proven.",
        reclaim_deadline_seconds="How long a reclaim of the guest's memory may take.",
    ),
    **_counters(
        "replica",
        grants="Grants written for the guest, 50 a second.",
        guest_tokens="Tokens that the guest sampled.",
        guest_yielded_seconds="Time in which the guest had work and was held back.",
        engine_restarts="Engines started again after an end that nobody asked for.",
        late_reclaims="Reclaims and stops that took longer than that, or gave too little.",
    ),
    # A guest that cannot be measured has no series: 0 would be good news.
    **_gauges(
        "replica measured_by",
        guest_memory_bytes="All memory that the guest holds, and who measured it.",
    ),
    **_gauges("replica state", engine_state="1 for the state of the engine's life."),
    **_gauges(
        "replica share",
        engine_placement="1 for how the engine is kept behind its host, as the kernel says.",
    ),
    **_counters(
        "replica what",
        weights_rejected="Weights that were not what their digests, signatures or proofs say.",
    ),
    **_counters(
        "host targets",
        host_requests="Requests of the host, by whether they met both of its targets.",
    ),
    **_gauges(
        "host",
        host_gpus="GPUs that the host is on.",
        host_running="Requests that run in the host.",
        host_waiting="Requests that wait in the host.",
        host_kv_usage="Share of the host's KV blocks in use, 0 to 1.",
        host_lent_bytes="KV memory that the host lends now.",
        host_lent_granules="Granules of KV memory that the host lends now.",
        host_reserve_missing_granules="Granules that the host needs back for its reserve.",
        host_ttft_target_seconds="The host's target of its TTFT.",
        host_tpot_target_seconds="The host's target of its TPOT.",
    ),
    **_gauges(
        "host engine support",
        host_engine_info="1, with the host's engine, which is tested, probed or refused.",
    ),
    **_gauges("host capability", host_lacks="1 for what the host was asked for and cannot."),
    **_counters("host", host_busy_seconds="Time in which the host was in a step."),
    **_gauges(
        "",
        kill_switch_active="1 while the kill switch is set: no guest may exist.",
        node_cut_off_seconds="For how long the node has heard no scheduler; 0 while it does.",
    ),
    **_gauges(
        "state",
        node_hosts="Hosts of the node: guarded beside a guest, watched without one, or refused.",
    ),
    **_counters(
        "", log_dropped_records="Records that found no room in a log's queue, and are lost."
    ),
    **_counters(
        "task", task_restarts="Background tasks of the daemon that died and were started again."
    ),
    **_gauges("task", task_running="1 while the background task runs, 0 while it is down."),
}


def _of_replica(view: ReplicaFigures) -> Iterator[Sample]:
    name = [view.name]
    yield "replica_ranks", name, view.ranks
    yield "policy_version", name, view.policy_version
    yield "engine_restarts", name, view.restarts
    yield "engine_state", [view.name, view.state], 1.0
    if view.held is not None and view.held.amount is not None:
        yield "guest_memory_bytes", [view.name, view.held.by], view.held.amount
    if grant := view.grant:
        for mode in GrantMode:
            holds = mode is grant.mode
            labels = [view.name, mode.name.lower(), grant.reason if holds else ""]
            yield "guest_mode", labels, float(holds)
        yield "guest_host_info", [view.name, view.host], 1.0
        yield "guest_duty", name, view.duty
        yield "grant_epoch", name, grant.epoch
        yield "grants", name, view.granted
        yield "guest_owed_bytes", name, view.owed_bytes
    if guest := view.guest:
        yield "guest_tokens", name, guest.tokens_total
        yield "guest_yielded_seconds", name, guest.yielded_ns / _NS
        yield "guest_running", name, guest.running
        yield "guest_waiting", name, guest.waiting
        yield "guest_last_step_seconds", name, guest.last_step_ns / _NS
        yield "guest_kv_bytes", name, guest.bytes_mapped


def _of_host(host: HostFigures) -> Iterator[Sample]:
    name = [host.name]
    for targets, count in zip(("met", "missed"), host.requests, strict=True):
        yield "host_requests", [host.name, targets], count
    yield "host_gpus", name, host.gpus
    yield "host_ttft_target_seconds", name, host.ttft.target_s
    yield "host_tpot_target_seconds", name, host.tpot.target_s
    if any(host.engine):
        yield "host_engine_info", [host.name, *host.engine], 1.0
    for lack in host.lacks:
        yield "host_lacks", [host.name, lack.partition(":")[0]], 1.0
    if state := host.state:
        yield "host_running", name, state.running
        yield "host_waiting", name, state.waiting
        yield "host_kv_usage", name, state.kv_used / max(1, state.kv_total)
        yield "host_lent_bytes", name, state.bytes_lent
        yield "host_lent_granules", name, state.granules_lent
        yield "host_reserve_missing_granules", name, state.reserve_missing
        yield "host_busy_seconds", name, state.busy_ns / _NS


def _of_node(health: NodeHealth) -> Iterator[Sample]:
    yield "kill_switch_active", (), float(health.killed)
    yield "node_cut_off_seconds", (), health.cut_off_s
    yield "log_dropped_records", (), health.dropped
    for state, count in health.hosts.items():
        yield "node_hosts", [state], count
    for task, restarted in health.restarted.items():
        yield "task_restarts", [task], restarted
        yield "task_running", [task], float(health.running.get(task, False))


def _latencies(hosts: Sequence[HostFigures]) -> Iterator[Metric]:
    for name in ("ttft", "tpot") if hosts else ():
        family = HistogramMetricFamily(
            f"rose_host_{name}_seconds",
            f"The host's {name.upper()} by request; its target is one of the bounds.",
            labels=["host"],
        )
        for host in hosts:
            histogram: LatencyHistogram = getattr(host, name)
            family.add_metric([host.name], histogram.buckets(), sum_value=histogram.sum_s)
        yield family


class NodeMetrics(Collector):
    """Prometheus collector of a node: it reads the figures of hosts, replicas and daemon at each
    scrape, and counts logged events.
    """

    def __init__(
        self,
        hosts: Callable[[], Iterable[HostFigures]],
        replicas: Callable[[], Iterable[ReplicaFigures]],
        health: Callable[[], NodeHealth] = NodeHealth,
    ) -> None:
        # Skip the series of creation times.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._hosts = hosts
        self._replicas = replicas
        self._health = health
        # Logged events by replica. A scrape shows them for all replicas: an alert needs the 0
        # before the first one, since `increase()` does not see a series begin.
        self._late = Tallied[str]()
        self._rejected = Tallied[tuple[str, str]]()
        self._placed: dict[str, str] = {}
        # Replicas that the log named, and those whose series were begun.
        self._named: set[str] = set()
        self._begun: set[str] = set()
        self._server: ThreadedMetricsServer | None = None
        self.registry = registry = CollectorRegistry()
        registry.register(self)
        self._freezes = Counter(
            "rose_guest_freezes",
            "Grants that froze, drained or ended the guest, by their reason.",
            ("replica", "reason"),
            registry=registry,
        )
        self._starts = Counter(
            "rose_engine_starts",
            "Engines that the daemon started, or adopted from an earlier one.",
            ("replica", "how"),
            registry=registry,
        )
        self._reclaim = Histogram(
            "rose_reclaim_seconds",
            "From the decision to end a guest until its last process was gone.",
            ("replica",),
            buckets=RECLAIM_BOUNDS_S,
            registry=registry,
        )
        self._levels = Counter(
            "rose_ladder_levels",
            "Levels of the reclaim ladder that were taken, by what became of them.",
            ("replica", "level", "outcome"),
            registry=registry,
        )
        self._ladder = Histogram(
            "rose_ladder_seconds",
            "From the request for memory to the end of the ladder; enough: all came.",
            ("replica", "enough"),
            buckets=RECLAIM_BOUNDS_S,
            registry=registry,
        )
        self._wire = Counter(
            "rose_weight_update_bytes",
            "Bytes that came for the replica's updates, as they were sent.",
            ("replica",),
            registry=registry,
        )
        self._pause = Histogram(
            "rose_weight_update_pause_seconds",
            "How long an update held up the replica's decoding.",
            ("replica",),
            buckets=PAUSE_BOUNDS_S,
            registry=registry,
        )
        build = Gauge(
            "rose_build_info",
            "1, with the version of the daemon and of its control page.",
            ("version", "page_layout"),
            registry=registry,
        )
        build.labels(release(), str(LAYOUT_VERSION)).set(1)

    def describe(self) -> Iterable[Metric]:
        """Return an empty list, so that registration reads no figures."""
        return ()

    def collect(self) -> Iterator[Metric]:
        views, hosts, health = list(self._replicas()), list(self._hosts()), self._health()
        self._show(frozenset(view.name for view in views))
        families: dict[str, Family] = {}
        for name, labels, value in self._samples(views, hosts, health):
            if name not in families:
                families[name] = READ[name]()
            families[name].add_metric(labels, value)
        yield from families.values()
        yield from _latencies(hosts)
        if health.certificate is not None:
            yield from certificate_families(health.certificate)
        yield damaged_files_family(health.damaged_files)

    def _samples(
        self, views: Iterable[ReplicaFigures], hosts: Iterable[HostFigures], health: NodeHealth
    ) -> Iterator[Sample]:
        for view in views:
            yield from _of_replica(view)
            if view.reclaim_s is not None:
                yield "reclaim_deadline_seconds", [view.name], view.reclaim_s
                yield "late_reclaims", [view.name], self._late[view.name]
            for what in REJECTIONS.values():
                yield "weights_rejected", [view.name, what], self._rejected[view.name, what]
            if share := self._placed.get(view.name):
                yield "engine_placement", [view.name, share], 1.0
        for host in hosts:
            yield from _of_host(host)
        yield from _of_node(health)

    def heard(self, event: str, fields: Mapping[str, object]) -> None:
        """Count one event of the node's event log in the metrics that it concerns (any thread)."""
        engine = str(fields.get("engine", ""))
        replica = str(fields.get("replica", engine))
        if replica:
            self._named.add(replica)
        if event in REJECTIONS:
            self._rejected[replica, REJECTIONS[event]] += 1
        elif event == "stop_overdue" or (event == "reclaim_ended" and not fields["in_time"]):
            self._late[replica] += 1
        if event == "grant" and fields["mode"] in FROZEN_MODES:
            self._freezes.labels(replica, fields["reason"]).inc()
        elif event in ("engine_started", "engine_adopted"):
            self._starts.labels(engine, event.removeprefix("engine_")).inc()
        elif event == "engine_reclaimed":
            self._reclaim.labels(engine).observe(float(str(fields["seconds"])))
        elif event == "reclaim_level":
            self._levels.labels(replica, fields["level"], fields["outcome"]).inc()
        elif event == "reclaim_ended":
            enough = str(fields["enough"]).lower()
            self._ladder.labels(replica, enough).observe(float(str(fields["seconds"])))
        elif event == "engine_placed":
            self._placed[engine] = str(fields["share"])

    def activated(self, record: Mapping[str, object]) -> None:
        """Add one record of the activation log to the metrics of update bytes and pauses."""
        replica = str(record["replica"])
        self._wire.labels(replica).inc(float(str(record["wire_bytes"])))
        self._pause.labels(replica).observe(float(str(record["pause_s"])))

    def _show(self, shown: frozenset[str]) -> None:
        """Create the series of new replicas at 0, and remove those of replicas that are gone."""
        for name in shown - self._begun:
            self._begun.add(name)
            for family in (self._reclaim, self._wire, self._pause):
                family.labels(name)
            for enough in ("true", "false"):
                self._ladder.labels(name, enough)
            for level, outcome in product(ReclaimLevel, ReclaimOutcome):
                self._levels.labels(name, level.name.lower(), outcome.value)
        for name in (self._named | self._begun) - shown:
            self._named.discard(name)
            self._begun.discard(name)
            self._late.pop(name, None)
            self._placed.pop(name, None)
            for what in REJECTIONS.values():
                self._rejected.pop((name, what), None)
            for family in (
                self._freezes, self._starts, self._reclaim, self._levels, self._ladder, self._wire,
                self._pause,
            ):  # fmt: skip
                family.remove_by_labels({"replica": name})

    async def serve(
        self, port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve `/metrics` at this address in threads. Raises ConfigError if the port stays
        taken.
        """

        async def bind() -> None:
            self._server = ThreadedMetricsServer(self.registry, host, port, tls)

        try:
            await bound(bind)
        except OSError as error:
            raise ConfigError(
                f"metrics_port {port} of {host} cannot be served: {error.strerror}; choose another"
            ) from error

    def close(self) -> None:
        """Stop the server of `/metrics`."""
        if self._server:
            self._server.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore errors of connections that the caller broke off."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, *_: object) -> None:
        """Log nothing: scrapes are frequent."""


class ThreadedMetricsServer:
    """HTTP server, in threads, that answers every request with all metrics of a registry; it checks
    no caller.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Bind the address and start serving, with TLS if `tls` is given. Raises OSError if the
        port is taken.
        """
        kind = _Server6 if ":" in host else _Server
        self._server = make_server(host, port, make_wsgi_app(registry), kind, _Handler)
        if tls is not None:
            # The handshake is the handler's: one that hangs must not keep others from connecting.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="rose-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop the server and close its socket."""
        self._server.shutdown()
        self._server.server_close()
