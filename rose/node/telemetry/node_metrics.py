"""Metrics of a node: `/metrics` on a thread of its own, so that a stuck daemon still serves it.

Gauges are read from the node's state at the moment of the scrape. `ReplicaPoller` asks an engine
without a control page for its figures now and then.
"""

import asyncio
import contextlib
import ssl
from collections import Counter as Tallied
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor import Grant, GrantMode, GuestState
from executor.control_page.page import LAYOUT_VERSION
from executor.kv.reclaim_ladder import ReclaimLevel, ReclaimOutcome
from rose.addresses import bound
from rose.errors import ConfigError, UnavailableError
from rose.metrics_server import certificate_families, damaged_files_family
from rose.node.replica_client import ReplicaClient
from rose.node.telemetry.host_metrics import HostFigures, host_families
from rose.node.telemetry.memory_gauges import HeldMemory
from rose.node.telemetry.metrics_server import ThreadedMetricsServer
from rose.release import release

INTERVAL_S = 1.0
# Events of the log, and what of the weights was refused.
REJECTIONS = {
    "chunk_rejected": "chunk",
    "version_refused": "version",
    "quarantined": "engine",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Turns on the engine and tokens since it started."""

    running: int = 0
    waiting: int = 0
    tokens_total: int = 0


class ReplicaPoller:
    """Keeps the last reading; an engine that does not answer has an empty one."""

    def __init__(self, client: ReplicaClient, is_up: Callable[[], bool]) -> None:
        self.reading = Reading()
        self._client = client
        self._is_up = is_up

    async def run(self) -> None:
        while True:
            self.reading = await self._read() if self._is_up() else Reading()
            await asyncio.sleep(INTERVAL_S)

    async def _read(self) -> Reading:
        # Telemetry only: whether the engine obeys is judged where it is told something.
        with contextlib.suppress(UnavailableError):
            state = await self._client.state()
            return Reading(state.running, state.waiting, state.tokens_total)
        return Reading()


_NS = 1e9


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Figures of one replica now; without a control page there is no grant or guest.

    `owed_bytes`: KV memory that its host took back and it still keeps. `held`: all that it holds.
    `reclaim_s`: how long a reclaim may take. `host`: name of the one that a guest is beside.
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


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Health of the daemon: log records dropped; restarts, and whether it runs, by task.

    killed: its kill switch is set. cut_off_s: since when no scheduler is heard, 0 while one is.
    certificate: Unix times between which its own one counts. hosts: how many there are by what is
    done with them: `guarded` has a guest, `watched` has none, `refused` is a page that is no host.
    """

    dropped: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, bool] = field(default_factory=dict)
    killed: bool = False
    cut_off_s: float = 0.0
    certificate: tuple[float, float] | None = None
    damaged_files: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """Counts of logged events by replica, which a scrape shows for all replicas.

    An alert needs the 0 before the first one: `increase()` does not see a series begin.
    """

    late: Tallied[str] = field(default_factory=Tallied)
    rejected: Tallied[tuple[str, str]] = field(default_factory=Tallied)
    placed: dict[str, str] = field(default_factory=dict)

    def forget(self, replica: str) -> None:
        self.late.pop(replica, None)
        self.placed.pop(replica, None)
        for what in REJECTIONS.values():
            self.rejected.pop((replica, what), None)


class LiveMetrics(Collector):
    """Asks for the views of all hosts and replicas, and for the node's health, at each scrape."""

    def __init__(
        self,
        hosts: Callable[[], Iterable[HostFigures]],
        replicas: Callable[[], Iterable[ReplicaFigures]],
        health: Callable[[], NodeHealth] = NodeHealth,
        tally: Tally | None = None,
        shown: Callable[[frozenset[str]], object] = lambda names: None,
    ) -> None:
        """`shown`: told the replicas of each scrape, before what is counted by them is read."""
        self._hosts = hosts
        self._replicas = replicas
        self._health = health
        self._tally = tally or Tally()
        self._shown = shown

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration asks for no view."""
        return ()

    def collect(self) -> Iterator[Metric]:
        views = list(self._replicas())
        self._shown(frozenset(view.name for view in views))
        guests = [view for view in views if view.grant]
        yield _modes(guests)
        yield _beside(guests)
        yield _gauge(
            "rose_guest_duty",
            "Share of the last second in which the guest made steps and was not held back.",
            guests,
            lambda v: v.duty,
        )
        yield _gauge(
            "rose_grant_epoch",
            "Epoch of the guest's grant; it grows with every mode.",
            guests,
            lambda v: v.grant.epoch if v.grant else None,
        )
        yield _counter(
            "rose_grants", "Grants written for the guest, 50 a second.", guests, lambda v: v.granted
        )
        yield _gauge(
            "rose_guest_owed_bytes",
            "KV memory that the host took back and the guest still keeps.",
            guests,
            lambda v: v.owed_bytes,
        )
        yield _held(views)
        yield from _of_guests([view for view in views if view.guest])
        yield from host_families(self._hosts())
        yield _gauge(
            "rose_policy_version",
            "Version of its job's weights that the replica has proven.",
            views,
            lambda v: v.policy_version,
        )
        yield _counter(
            "rose_engine_restarts",
            "Engines started again after an end that nobody asked for.",
            views,
            lambda v: v.restarts,
        )
        yield _states(views)
        yield from _of_tally(views, self._tally)
        yield from _of_node(self._health())


Value = Callable[[ReplicaFigures], float | None]


def _of_guests(views: list[ReplicaFigures]) -> Iterator[Metric]:
    def of(read: Callable[[GuestState], float]) -> Value:
        return lambda view: read(view.guest) if view.guest else None

    yield _counter(
        "rose_guest_tokens", "Tokens that the guest sampled.", views, of(lambda g: g.tokens_total)
    )
    yield _counter(
        "rose_guest_yielded_seconds",
        "Time in which the guest had work and was held back.",
        views,
        of(lambda g: g.yielded_ns / _NS),
    )
    yield _gauge(
        "rose_guest_running", "Turns that run in the guest.", views, of(lambda g: g.running)
    )
    yield _gauge(
        "rose_guest_waiting", "Turns that wait in the guest.", views, of(lambda g: g.waiting)
    )
    yield _gauge(
        "rose_guest_last_step_seconds",
        "How long the guest's last step took.",
        views,
        of(lambda g: g.last_step_ns / _NS),
    )
    yield _gauge(
        "rose_guest_kv_bytes",
        "KV memory that the guest has mapped.",
        views,
        of(lambda g: g.bytes_mapped),
    )


def _of_tally(views: list[ReplicaFigures], tally: Tally) -> Iterator[Metric]:
    guests = [view for view in views if view.reclaim_s is not None]
    yield _gauge(
        "rose_reclaim_deadline_seconds",
        "How long a reclaim of the guest's memory may take.",
        guests,
        lambda v: v.reclaim_s,
    )
    yield _counter(
        "rose_late_reclaims",
        "Reclaims and stops that took longer than that, or gave too little.",
        guests,
        lambda v: float(tally.late[v.name]),
    )
    rejected = CounterMetricFamily(
        "rose_weights_rejected",
        "Weights that were not what their digests, signatures or proofs say.",
        labels=["replica", "what"],
    )
    placed = GaugeMetricFamily(
        "rose_engine_placement",
        "1 for how the engine is kept behind its host, as the kernel says.",
        labels=["replica", "share"],
    )
    for view in views:
        for what in REJECTIONS.values():
            rejected.add_metric([view.name, what], float(tally.rejected[view.name, what]))
        if share := tally.placed.get(view.name):
            placed.add_metric([view.name, share], 1.0)
    yield rejected
    yield placed


def _of_node(health: NodeHealth) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "rose_kill_switch_active",
        "1 while the kill switch is set: no guest may exist.",
        value=float(health.killed),
    )
    yield GaugeMetricFamily(
        "rose_node_cut_off_seconds",
        "For how long the node has heard no scheduler; 0 while it does.",
        value=health.cut_off_s,
    )
    hosts = GaugeMetricFamily(
        "rose_node_hosts",
        "Hosts of the node: guarded beside a guest, watched without one, or refused.",
        labels=["state"],
    )
    for state, count in health.hosts.items():
        hosts.add_metric([state], count)
    yield hosts
    if health.certificate is not None:
        yield from certificate_families(health.certificate)
    yield damaged_files_family(health.damaged_files)
    yield CounterMetricFamily(
        "rose_log_dropped_records",
        "Records that found no room in a log's queue, and are lost.",
        value=float(health.dropped),
    )
    restarts = CounterMetricFamily(
        "rose_task_restarts",
        "Background tasks of the daemon that died and were started again.",
        labels=["task"],
    )
    running = GaugeMetricFamily(
        "rose_task_running",
        "1 while the background task runs, 0 while it is down.",
        labels=["task"],
    )
    for name, restarted in health.restarted.items():
        restarts.add_metric([name], float(restarted))
        running.add_metric([name], float(health.running.get(name, False)))
    yield restarts
    yield running


def _modes(views: list[ReplicaFigures]) -> Metric:
    family = GaugeMetricFamily(
        "rose_guest_mode",
        "1 for the mode of the guest's grant, with its reason; 0 for the others.",
        labels=["replica", "mode", "reason"],
    )
    for view in views:
        assert view.grant
        for mode in GrantMode:
            reason = view.grant.reason if mode is view.grant.mode else ""
            holds = float(mode is view.grant.mode)
            family.add_metric([view.name, mode.name.lower(), reason], holds)
    return family


def _beside(views: list[ReplicaFigures]) -> Metric:
    """Return the family by which queries join guests with their hosts."""
    family = GaugeMetricFamily(
        "rose_guest_host_info",
        "1, with the host that the guest is beside.",
        labels=["replica", "host"],
    )
    for view in views:
        family.add_metric([view.name, view.host], 1.0)
    return family


def _held(views: list[ReplicaFigures]) -> Metric:
    """Return guests' memory without guests that cannot be measured: 0 would be good news."""
    family = GaugeMetricFamily(
        "rose_guest_memory_bytes",
        "All memory that the guest holds, and who measured it.",
        labels=["replica", "measured_by"],
    )
    for view in views:
        if view.held is not None and view.held.amount is not None:
            family.add_metric([view.name, view.held.by], view.held.amount)
    return family


def _states(views: list[ReplicaFigures]) -> Metric:
    family = GaugeMetricFamily(
        "rose_engine_state", "1 for the state of the engine's life.", labels=["replica", "state"]
    )
    for view in views:
        family.add_metric([view.name, view.state], 1.0)
    return family


def _gauge(name: str, what: str, views: list[ReplicaFigures], value: Value) -> Metric:
    return _filled(GaugeMetricFamily(name, what, labels=["replica"]), views, value)


def _counter(name: str, what: str, views: list[ReplicaFigures], value: Value) -> Metric:
    return _filled(CounterMetricFamily(name, what, labels=["replica"]), views, value)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, views: list[ReplicaFigures], value: Value
) -> Metric:
    for view in views:
        family.add_metric([view.name], value(view) or 0.0)
    return family


FROZEN_MODES = ("freeze", "drain", "kill")
PAUSE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RECLAIM_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


class NodeMetrics:
    """Counts what the event log hears."""

    def __init__(
        self,
        hosts: Callable[[], Iterable[HostFigures]],
        replicas: Callable[[], Iterable[ReplicaFigures]],
        health: Callable[[], NodeHealth] = NodeHealth,
    ) -> None:
        # Skip the series of creation times.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._tally = Tally()
        # Replicas that the log named, and those whose series were begun.
        self._named: set[str] = set()
        self._begun: set[str] = set()
        live = LiveMetrics(hosts, replicas, health, self._tally, self._show)
        self.registry.register(live)
        self._freezes = self._counter(
            "rose_guest_freezes",
            "Grants that froze, drained or ended the guest, by their reason.",
            ("replica", "reason"),
        )
        self._starts = self._counter(
            "rose_engine_starts",
            "Engines that the daemon started, or adopted from an earlier one.",
            ("replica", "how"),
        )
        self._reclaim = Histogram(
            "rose_reclaim_seconds",
            "From the decision to end a guest until its last process was gone.",
            ("replica",),
            buckets=RECLAIM_BOUNDS_S,
            registry=self.registry,
        )
        self._levels = self._counter(
            "rose_ladder_levels",
            "Levels of the reclaim ladder that were taken, by what became of them.",
            ("replica", "level", "outcome"),
        )
        self._ladder = Histogram(
            "rose_ladder_seconds",
            "From the request for memory to the end of the ladder; enough: all came.",
            ("replica", "enough"),
            buckets=RECLAIM_BOUNDS_S,
            registry=self.registry,
        )
        self._wire = self._counter(
            "rose_weight_update_bytes",
            "Bytes that came for the replica's updates, as they were sent.",
            ("replica",),
        )
        self._pause = Histogram(
            "rose_weight_update_pause_seconds",
            "How long an update held up the replica's decoding.",
            ("replica",),
            buckets=PAUSE_BOUNDS_S,
            registry=self.registry,
        )
        self._by_replica = (
            self._freezes, self._starts, self._reclaim, self._levels, self._ladder, self._wire,
            self._pause,
        )  # fmt: skip
        build = self._gauge(
            "rose_build_info",
            "1, with the version of the daemon and of its control page.",
            ("version", "page_layout"),
        )
        build.labels(release(), str(LAYOUT_VERSION)).set(1)
        self._server: ThreadedMetricsServer | None = None

    def heard(self, event: str, fields: Mapping[str, object]) -> None:
        """Take one event of the log (any thread)."""
        engine = str(fields.get("engine", ""))
        self._count(event, str(fields.get("replica", engine)), fields)
        if event == "grant" and fields["mode"] in FROZEN_MODES:
            self._freezes.labels(fields["replica"], fields["reason"]).inc()
        elif event in ("engine_started", "engine_adopted"):
            self._starts.labels(engine, event.removeprefix("engine_")).inc()
        elif event == "engine_reclaimed":
            self._reclaim.labels(engine).observe(float(str(fields["seconds"])))
        elif event == "reclaim_level":
            self._levels.labels(fields["replica"], fields["level"], fields["outcome"]).inc()
        elif event == "reclaim_ended":
            enough = str(fields["enough"]).lower()
            self._ladder.labels(fields["replica"], enough).observe(float(str(fields["seconds"])))
        elif event == "engine_placed":
            self._tally.placed[engine] = str(fields["share"])

    def _count(self, event: str, replica: str, fields: Mapping[str, object]) -> None:
        if replica:
            self._named.add(replica)
        if event in REJECTIONS:
            self._tally.rejected[replica, REJECTIONS[event]] += 1
        elif event == "stop_overdue" or (event == "reclaim_ended" and not fields["in_time"]):
            self._tally.late[replica] += 1

    def _show(self, shown: frozenset[str]) -> None:
        """Series of all replicas from their 0 on, and none of those that are no more."""
        for name in shown - self._begun:
            self._begun.add(name)
            self._reclaim.labels(name)
            self._wire.labels(name)
            self._pause.labels(name)
            for enough in ("true", "false"):
                self._ladder.labels(name, enough)
            for level, outcome in product(ReclaimLevel, ReclaimOutcome):
                self._levels.labels(name, level.name.lower(), outcome.value)
        for name in (self._named | self._begun) - shown:
            self._named.discard(name)
            self._begun.discard(name)
            self._tally.forget(name)
            for family in self._by_replica:
                family.remove_by_labels({"replica": name})

    def activated(self, record: Mapping[str, object]) -> None:
        """Take one line of the log of activations."""
        replica = str(record["replica"])
        self._wire.labels(replica).inc(float(str(record["wire_bytes"])))
        self._pause.labels(replica).observe(float(str(record["pause_s"])))

    async def serve(
        self, port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        """Answer there; ConfigError when the port stays taken."""

        async def bind() -> None:
            self._server = ThreadedMetricsServer(self.registry, host, port, tls)

        try:
            await bound(bind)
        except OSError as error:
            raise ConfigError(
                f"metrics_port {port} of {host} cannot be served: {error.strerror}; choose another"
            ) from error

    def close(self) -> None:
        """Stop answering."""
        if self._server:
            self._server.close()

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(name, what, labels, registry=self.registry)
