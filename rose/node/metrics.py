"""`/metrics` of a node: served by a thread of its own, so that a stuck daemon still shows it."""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from executor import LatencyRecord
from executor.control_page import LAYOUT_VERSION
from rose.errors import ConfigError
from rose.node.engine_config import HostConfig
from rose.node.live_metrics import LiveMetrics, NodeHealth, ReplicaView

FROZEN_MODES = ("freeze", "drain", "kill")
# Shares of the target; 1.0 makes attainment a bucket of its own.
LADDER = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
RECLAIM_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_NS = 1e9


class NodeMetrics:
    """Counts what the event log hears and what hosts' users experience."""

    def __init__(
        self,
        host: HostConfig | None,
        replicas: Callable[[], Iterable[ReplicaView]],
        health: Callable[[], NodeHealth] = NodeHealth,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(LiveMetrics(replicas, health))
        self._freezes = self._counter(
            "rose_guest_freezes", "Times a guest was frozen.", ("replica", "reason")
        )
        self._starts = self._counter(
            "rose_engine_starts", "Engines started or adopted.", ("replica", "how")
        )
        self._reclaim = Histogram(
            "rose_reclaim_seconds",
            "From the decision to end a guest to its last process gone.",
            ("replica",),
            buckets=RECLAIM_BOUNDS_S,
            registry=self.registry,
        )
        self._rungs = self._counter(
            "rose_ladder_rungs",
            "Rungs of the reclaim ladder that were taken.",
            ("replica", "rung", "outcome"),
        )
        self._ladder = Histogram(
            "rose_ladder_seconds",
            "From the wish for memory to the end of the ladder; enough: all of it came.",
            ("replica", "enough"),
            buckets=RECLAIM_BOUNDS_S,
            registry=self.registry,
        )
        self._placed = self._gauge(
            "rose_engine_placement", "How an engine is kept behind the host.", ("replica", "share")
        )
        build = self._gauge("rose_build_info", "What runs here.", ("version", "page_layout"))
        build.labels(_version(), str(LAYOUT_VERSION)).set(1)
        self._ttft = self._tpot = None
        if host:
            targets = {"ttft": host.ttft_target_s, "tpot": host.tpot_target_s}
            self._ttft, self._tpot = (self._latency(n, s) for n, s in targets.items())
        self._server: WSGIServer | None = None

    def heard(self, event: str, fields: Mapping[str, object]) -> None:
        """Take one event of the log (any thread)."""
        engine = str(fields.get("engine", ""))
        if event == "grant" and fields["mode"] in FROZEN_MODES:
            self._freezes.labels(fields["replica"], fields["reason"]).inc()
        elif event in ("engine_started", "engine_adopted"):
            self._starts.labels(engine, event.removeprefix("engine_")).inc()
        elif event == "engine_reclaimed":
            self._reclaim.labels(engine).observe(float(str(fields["seconds"])))
        elif event == "reclaim_rung":
            self._rungs.labels(fields["replica"], fields["rung"], fields["outcome"]).inc()
        elif event == "reclaim_ended":
            enough = str(fields["enough"]).lower()
            self._ladder.labels(fields["replica"], enough).observe(float(str(fields["seconds"])))
        elif event == "engine_placed":
            self._placed.labels(engine, fields["share"]).set(1)

    def served(self, record: LatencyRecord) -> None:
        """Take the latencies of one of the host's requests."""
        if self._ttft and self._tpot:
            self._ttft.observe(record.ttft_ns / _NS)
            if record.tpot_ns:
                self._tpot.observe(record.tpot_ns / _NS)

    def serve(self, port: int) -> None:
        """Answer on loopback; ConfigError when the port is taken."""
        try:
            self._server, _ = start_http_server(port, "127.0.0.1", self.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_port {port} is busy: {error.strerror}; choose another"
            ) from error

    def close(self) -> None:
        """Stop answering."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(name, what, labels, registry=self.registry)

    def _latency(self, name: str, target_s: float) -> Histogram:
        self._gauge(f"rose_host_{name}_target_seconds", "The target.", ()).set(target_s)
        return Histogram(
            f"rose_host_{name}_seconds",
            f"The host's {name.upper()} by request; its target is one of the bounds.",
            buckets=[target_s * share for share in LADDER],
            registry=self.registry,
        )


def _version() -> str:
    try:
        return version("rose-rollout")
    except PackageNotFoundError:
        return "unknown"
