"""Gauges that are read from the node's own state at the moment of the scrape."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor import Grant, GrantMode, GuestState, HostState
from rose.node.memory import Held

_NS = 1e9


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What is known of one replica now; without a control page there is no grant, guest or host.

    `owed_bytes`: KV memory that its host took back and it still keeps. `held`: all that it holds.
    """

    name: str
    state: str
    restarts: int
    policy_version: int
    duty: float = 1.0
    granted: int = 0
    grant: Grant | None = None
    guest: GuestState | None = None
    host: HostState | None = None
    owed_bytes: int = 0
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What the daemon itself lacks: log records dropped; restarts, and whether it runs, by task."""

    dropped: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, bool] = field(default_factory=dict)


class LiveMetrics(Collector):
    """Asks for the views of all replicas, and for the node's health, at each scrape."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[ReplicaView]],
        health: Callable[[], NodeHealth] = NodeHealth,
    ) -> None:
        self._replicas = replicas
        self._health = health

    def describe(self) -> Iterable[Metric]:
        """Names are checked for clashes without asking for any view."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        views = list(self._replicas())
        guests = [view for view in views if view.grant]
        yield _modes(guests)
        yield _gauge("rose_guest_duty", "Share of the last second.", guests, lambda v: v.duty)
        yield _gauge(
            "rose_grant_epoch",
            "Grows with every mode.",
            guests,
            lambda v: v.grant.epoch if v.grant else None,
        )
        yield _counter("rose_grants", "Grants written.", guests, lambda v: v.granted)
        yield _gauge(
            "rose_guest_owed_bytes", "Its host took them back.", guests, lambda v: v.owed_bytes
        )
        yield _held(views)
        yield from _of_guests([view for view in views if view.guest])
        # A node has one host, which all of its guests share.
        yield from _of_host(next((view.host for view in views if view.host), None))
        yield _gauge("rose_policy_version", "Proven.", views, lambda v: v.policy_version)
        yield _counter("rose_engine_restarts", "After an end.", views, lambda v: v.restarts)
        yield _states(views)
        yield from _of_node(self._health())


Value = Callable[[ReplicaView], float | None]


def _of_guests(views: list[ReplicaView]) -> Iterator[Metric]:
    def of(read: Callable[[GuestState], float]) -> Value:
        return lambda view: read(view.guest) if view.guest else None

    yield _counter("rose_guest_tokens", "Sampled.", views, of(lambda g: g.tokens_total))
    yield _counter(
        "rose_guest_yielded_seconds",
        "Had work and waited.",
        views,
        of(lambda g: g.yielded_ns / _NS),
    )
    yield _gauge("rose_guest_running", "Turns that run.", views, of(lambda g: g.running))
    yield _gauge("rose_guest_waiting", "Turns that wait.", views, of(lambda g: g.waiting))
    yield _gauge(
        "rose_guest_last_step_seconds", "Its last step.", views, of(lambda g: g.last_step_ns / _NS)
    )
    yield _gauge("rose_guest_kv_bytes", "Mapped for KV.", views, of(lambda g: g.bytes_mapped))


def _of_node(health: NodeHealth) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "rose_log_dropped_records", "Lost by its logs.", value=float(health.dropped)
    )
    restarts = CounterMetricFamily(
        "rose_task_restarts", "Of its background tasks.", labels=["task"]
    )
    running = GaugeMetricFamily("rose_task_running", "0 while it is down.", labels=["task"])
    for name, restarted in health.restarted.items():
        restarts.add_metric([name], float(restarted))
        running.add_metric([name], float(health.running[name]))
    yield restarts
    yield running


def _of_host(host: HostState | None) -> Iterator[Metric]:
    if host is None:
        return
    for name, what, value in (
        ("rose_host_running", "Requests that run.", host.running),
        ("rose_host_waiting", "Requests that wait.", host.waiting),
        ("rose_host_kv_usage", "Share of its KV blocks.", host.kv_used / max(1, host.kv_total)),
        ("rose_host_lent_bytes", "KV memory it gave up for now.", host.bytes_lent),
        ("rose_host_lent_granules", "Of its KV granules.", host.granules_lent),
        ("rose_host_reserve_missing_granules", "It needs them back.", host.reserve_missing),
    ):
        yield GaugeMetricFamily(name, what, value=value)
    yield CounterMetricFamily("rose_host_busy_seconds", "In a step.", value=host.busy_ns / _NS)


def _modes(views: list[ReplicaView]) -> Metric:
    family = GaugeMetricFamily(
        "rose_guest_mode", "1 for the mode that holds.", labels=["replica", "mode", "reason"]
    )
    for view in views:
        assert view.grant
        for mode in GrantMode:
            reason = view.grant.reason if mode is view.grant.mode else ""
            holds = float(mode is view.grant.mode)
            family.add_metric([view.name, mode.name.lower(), reason], holds)
    return family


def _held(views: list[ReplicaView]) -> Metric:
    """What cannot be measured is left out: 0 would be good news."""
    family = GaugeMetricFamily(
        "rose_guest_memory_bytes", "All that it holds.", labels=["replica", "measured_by"]
    )
    for view in views:
        if view.held is not None and view.held.amount is not None:
            family.add_metric([view.name, view.held.by], view.held.amount)
    return family


def _states(views: list[ReplicaView]) -> Metric:
    family = GaugeMetricFamily("rose_engine_state", "1 for it.", labels=["replica", "state"])
    for view in views:
        family.add_metric([view.name, view.state], 1.0)
    return family


def _gauge(name: str, what: str, views: list[ReplicaView], value: Value) -> Metric:
    return _filled(GaugeMetricFamily(name, what, labels=["replica"]), views, value)


def _counter(name: str, what: str, views: list[ReplicaView], value: Value) -> Metric:
    return _filled(CounterMetricFamily(name, what, labels=["replica"]), views, value)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, views: list[ReplicaView], value: Value
) -> Metric:
    for view in views:
        family.add_metric([view.name], value(view) or 0.0)
    return family
