"""A host as its node sees it: its page, the latencies of its requests, its load.

With a guest beside it the guest's guard reads the page; without one `look` does, so that a node
that lends nothing still says what its hosts do.
"""

import time
from collections.abc import Sequence
from threading import Lock

from executor import ControlPage, HostState, LatencyRecord
from executor.control_page.host_seat import HeldLock
from rose.logs.eventlog import JsonlLog
from rose.node.config import HostConfig
from rose.node.grants.host_load import HostLoad, SloCounter
from rose.node.grants.host_scrape import HostScrape
from rose.node.grants.host_watch import HostWatch
from rose.node.telemetry.host_metrics import HostFigures, LatencyHistogram
from rose.rpc import rose_pb2

LOOK_EVERY_S = 0.1
_NS = 1e9


class Host:
    """One host of a node. `guarded`: a guard of its guest drains its latencies."""

    def __init__(
        self,
        config: HostConfig,
        page: ControlPage,
        latencies: JsonlLog,
        right: HeldLock,
    ) -> None:
        """`right`: to grant on the page, which one daemon has, held until `close`."""
        targets = config.ttft_target_s, config.tpot_target_s
        self.config = config
        self.page = page
        self._right = right
        self.guarded = False
        self._lock = Lock()
        self._closed = False
        self.scrape = HostScrape(*targets, config.metrics_model) if config.metrics_url else None
        self.watch = HostWatch(latencies, self._served, page.latency.cursor, config.name)
        self._slo = SloCounter(*targets)
        self._load = HostLoad()
        self._ttft, self._tpot = (LatencyHistogram(target_s) for target_s in targets)

    @property
    def state(self) -> HostState | None:
        """The host's last published state (any thread); guards read the page themselves."""
        with self._lock:
            return None if self._closed or self.page.cut_short else self.page.host.peek()

    @property
    def requests(self) -> tuple[int, int]:
        """Requests that met both targets, and those that missed one, since it was found."""
        counted = self.scrape or self._slo
        return counted.good, counted.bad

    def look(self) -> None:
        """Take what is new of its latencies, unless a guard does."""
        if not (self.guarded or self._closed or self.page.cut_short):
            self.watch.drain(self.page)

    def figures(self) -> HostFigures:
        return HostFigures(
            self.config.name, self._ttft, self._tpot, self.state, requests=self.requests
        )

    def telemetry(self, node: str) -> rose_pb2.HostTelemetry:
        now_s = time.monotonic()
        state = self.state
        said = self.scrape.summary(now_s) if self.scrape else self.watch.summary()
        good, bad = self.requests
        told = rose_pb2.HostTelemetry(
            node=node,
            host=self.config.name,
            source="scrape" if self.scrape else "plugin",
            slo_good=good,
            slo_bad=bad,
            busy_ns=state.busy_ns if state else 0,
            running=state.running if state else 0,
            waiting=state.waiting if state else 0,
            window_requests=said.requests,
            window_s=said.window_s,
            ttft_p50_s=said.ttft_p50_s,
            ttft_p95_s=said.ttft_p95_s,
            tpot_p50_s=said.tpot_p50_s,
            tpot_p95_s=said.tpot_p95_s,
            ttft_target_s=self.config.ttft_target_s,
            tpot_target_s=self.config.tpot_target_s,
            kv_share=state.kv_used / state.kv_total if state and state.kv_total else None,
        )
        if self.scrape:
            told.running, told.waiting = self.scrape.running(now_s) or (0, 0)
            share = self.scrape.busy_share(now_s)
        else:
            share = self._load.busy_share(None if state is None else state.busy_ns)
        if share is not None:
            told.busy_share = share
        return told

    def close(self) -> None:
        """Let go of the page, once its guard has ended; the rest says what it said last."""
        with self._lock:
            self._closed = True
            self.page.close()
        self._right.close()

    def _served(self, record: LatencyRecord) -> None:
        self._slo.count(record)
        self._ttft.observe(record.ttft_ns / _NS)
        if record.tpot_ns:
            self._tpot.observe(record.tpot_ns / _NS)


def summed(
    hosts: Sequence[rose_pb2.HostTelemetry], left: tuple[int, int] = (0, 0)
) -> rose_pb2.HostTelemetry:
    """Return all hosts of a node as one, which capacity policies judge.

    Counts are sums, with those of hosts that `left`, since they must not fall. Shares are those of
    the busiest and of the fullest host that is known: a mean would lend beside a host without time
    to spare, as long as its neighbours idle. Latencies are of the host that is closest to its
    targets, or the farthest beyond.
    """
    told = rose_pb2.HostTelemetry()
    told.CopyFrom(max(hosts, key=_strain))
    told.host = "" if len(hosts) > 1 else told.host
    for name in ("busy_ns", "running", "waiting", "window_requests"):
        setattr(told, name, sum(getattr(each, name) for each in hosts))
    told.slo_good = sum(each.slo_good for each in hosts) + left[0]
    told.slo_bad = sum(each.slo_bad for each in hosts) + left[1]
    told.ClearField("busy_share")
    if busy := [each.busy_share for each in hosts if each.HasField("busy_share")]:
        told.busy_share = max(busy)
    told.ClearField("kv_share")
    if kv := [each.kv_share for each in hosts if each.HasField("kv_share")]:
        told.kv_share = max(kv)
    return told


def _strain(host: rose_pb2.HostTelemetry) -> float:
    ttft, tpot = host.ttft_p95_s / host.ttft_target_s, host.tpot_p95_s / host.tpot_target_s
    return max(ttft, tpot)
