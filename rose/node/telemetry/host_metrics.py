"""Metrics of a node's hosts, each under its name: gone from `/metrics` with the host.

A host that the node's file names has the name "", which to Prometheus is no label at all.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from executor import HostState

# Shares of the target; 1.0 makes attainment a bucket of its own.
LADDER: Final = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0)
_NS = 1e9


class LatencyHistogram:
    """Latencies of one host's requests, counted below multiples of its target.

    One thread observes; another may read a request more in the sum than in the counts.
    """

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self.sum_s = 0.0
        self._bounds_s = [target_s * share for share in LADDER]
        self._counts = [0] * (len(LADDER) + 1)

    def observe(self, seconds: float) -> None:
        """Count one request."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many requests took no longer, as Prometheus has them."""
        total, buckets = 0, []
        for bound_s, count in zip([*self._bounds_s, float("inf")], list(self._counts), strict=True):
            total += count
            bound = floatToGoString(bound_s)  # type: ignore[no-untyped-call]
            buckets.append((bound, float(total)))
        return buckets


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Figures of one host now; `state` is None while nobody publishes one.

    requests: those that met both targets, and those that missed one.
    """

    name: str
    ttft: LatencyHistogram
    tpot: LatencyHistogram
    state: HostState | None = None
    requests: tuple[int, int] = (0, 0)


def host_families(hosts: Iterable[HostFigures]) -> Iterator[Metric]:
    """Yield all families of a node's hosts, none for a node without hosts."""
    shown = list(hosts)
    if not shown:
        return
    yield _requests(shown)
    for name in ("ttft", "tpot"):
        yield from _latencies(name, [(each.name, getattr(each, name)) for each in shown])
    yield from _states([(each.name, each.state) for each in shown if each.state is not None])


def _requests(hosts: Iterable[HostFigures]) -> Metric:
    family = CounterMetricFamily(
        "rose_host_requests",
        "Requests of the host, by whether they met both of its targets.",
        labels=["host", "targets"],
    )
    for each in hosts:
        for targets, count in zip(("met", "missed"), each.requests, strict=True):
            family.add_metric([each.name, targets], float(count))
    return family


def _latencies(name: str, hosts: list[tuple[str, LatencyHistogram]]) -> Iterator[Metric]:
    targets = GaugeMetricFamily(
        f"rose_host_{name}_target_seconds",
        f"The host's target of its {name.upper()}.",
        labels=["host"],
    )
    seconds = HistogramMetricFamily(
        f"rose_host_{name}_seconds",
        f"The host's {name.upper()} by request; its target is one of the bounds.",
        labels=["host"],
    )
    for host, latencies in hosts:
        targets.add_metric([host], latencies.target_s)
        seconds.add_metric([host], buckets=latencies.buckets(), sum_value=latencies.sum_s)
    yield targets
    yield seconds


def _states(hosts: list[tuple[str, HostState]]) -> Iterator[Metric]:
    if not hosts:
        return
    gauges: tuple[tuple[str, str, Callable[[HostState], float]], ...] = (
        ("rose_host_running", "Requests that run in the host.", lambda s: s.running),
        ("rose_host_waiting", "Requests that wait in the host.", lambda s: s.waiting),
        (
            "rose_host_kv_usage",
            "Share of the host's KV blocks in use, 0 to 1.",
            lambda s: s.kv_used / max(1, s.kv_total),
        ),
        ("rose_host_lent_bytes", "KV memory that the host lends now.", lambda s: s.bytes_lent),
        (
            "rose_host_lent_granules",
            "Granules of KV memory that the host lends now.",
            lambda s: s.granules_lent,
        ),
        (
            "rose_host_reserve_missing_granules",
            "Granules that the host needs back for its reserve.",
            lambda s: s.reserve_missing,
        ),
    )
    for name, what, value in gauges:
        family = GaugeMetricFamily(name, what, labels=["host"])
        for host, state in hosts:
            family.add_metric([host], value(state))
        yield family
    busy = CounterMetricFamily(
        "rose_host_busy_seconds", "Time in which the host was in a step.", labels=["host"]
    )
    for host, state in hosts:
        busy.add_metric([host], state.busy_ns / _NS)
    yield busy
