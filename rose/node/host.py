"""A host as its node sees it: its page, its process, the latencies of its requests, its load.

With a guest beside it the guest's guard reads the page; without one `look` does, so that a node
that lends nothing still says what its hosts do. `HostProcess` checks that the publisher on the page
is the process that the node means, and that it still runs. `HostWatch` keeps each request's
latencies and sums up the last of them. `HostScrape` watches a host without the plugin:

    GET /metrics, every second ──> HostScrape ──> requests by their targets, load, latencies

It serves budgets, advice and dashboards, and no lending. A guest yields within a step because its
host writes each change of queue and step to the control page. A scrape is a second old, cannot say
when a request comes, and knows no deadline, so beside a host that is scraped alone a guest stays
frozen (`no_host`) however idle the figures look. Scraping suffices where nothing reacts in
milliseconds: to see what a policy would lend before a host gets the plugin.

Two histograms do not say which requests met both targets: each miss of either is counted as a
request of its own, up to all, so the budget seems to burn faster than it does, never slower.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Final

import aiohttp

from executor import ControlPage, HostState, HostView, LatencyRecord, SeatState
from executor.control_page.host_description import HostDescription
from executor.control_page.host_seat import MOST_CORES, HeldLock
from executor.control_page.latency_ring import START, Cursor
from executor.freeze_reason import FreezeReason
from rose.logs.eventlog import JsonlLog
from rose.node.config import HostConfig
from rose.node.metrics import HostFigures, LatencyHistogram
from rose.process.procfs import ProcessIdentity, ProcessStat, pid_namespace
from rose.rpc import rose_pb2
from slo import Histogram, Scrape, ScrapeError, parse_scrape, percentile

LOOK_EVERY_S = 0.1
_NS = 1e9
HOST_LATENCY = "host_latency.jsonl"
# Shortest interval of a busy share: a shorter one measures steps and not load.
LEAST_INTERVAL_S: Final = 0.9
_MOST_ANCESTORS: Final = 64
EVERY_S: Final = 1.0
TIMEOUT_S: Final = 2.0
MOST_BYTES: Final = 8 << 20
WINDOW_S: Final = 10.0
QUANTILES: Final = (0.5, 0.95)
NO_LATENCY: Final = (0.0, 0.0)
# Age in seconds above which a scrape counts as no data.
STALE_S: Final = 5.0


class Host:
    """One host of a node: its control page, its request latencies and, without the plugin, its
    scrapes.

    guarded: True if the guard thread of a guest reads the host's latencies, so `look` does not.
    """

    def __init__(
        self,
        config: HostConfig,
        page: ControlPage,
        latencies: JsonlLog,
        right: HeldLock,
    ) -> None:
        """Keep the page and `right`, the lock that allows this daemon alone to write grants on it,
        until `close`.
        """
        targets = config.ttft_target_s, config.tpot_target_s
        self.config = config
        self.page = page
        self._right = right
        self.guarded = False
        self._lock = Lock()
        self._closed = False
        self.scrape = HostScrape(*targets, config.metrics_model) if config.metrics_url else None
        self.watch = HostWatch(latencies, self._served, page.latency.cursor, config.name)
        self._met = self._missed = self._prompt_tokens = self._output_tokens = 0
        self._load = HostLoad()
        self._ttft, self._tpot = (LatencyHistogram(target_s) for target_s in targets)

    @property
    def state(self) -> HostState | None:
        """HostState that the host published last on its page, None without one or after `close`
        (any thread). Guards read the page themselves.
        """
        with self._lock:
            state = None if self._closed else self.page.host_state
        return None if state is None else lent_on(state, len(self.config.gpus))

    @property
    def publishers(self) -> list[int]:
        """Ids of the processes that publish on the page, as `publishers_on` gives them."""
        with self._lock:
            return [] if self._closed else publishers_on(self.page)

    @property
    def requests(self) -> tuple[int, int]:
        """Counts of the host's requests since it was discovered: (met both latency targets, missed
        at least one).
        """
        return (self.scrape.good, self.scrape.bad) if self.scrape else (self._met, self._missed)

    def look(self) -> None:
        """Read new latency records from the page into the host's window, log and counters; do
        nothing if a guard reads them or the page is closed.
        """
        if not (self.guarded or self._closed or self.page.cut_short):
            self.watch.drain(self.page)

    def figures(self) -> HostFigures:
        """Return the host's figures at a scrape; the engine is what the host says of itself."""
        with self._lock:
            view = HostView() if self._closed else self.page.host_view()
        seat = view.seat if view.seated else None
        said = HostDescription.current(self.page.path, seat.taken_ns) if seat else None
        support = "refused" if view.vetoed and not view.replaced else said.support if said else ""
        return HostFigures(
            self.config.name,
            self._ttft,
            self._tpot,
            view.state and lent_on(view.state, len(self.config.gpus)),
            self.requests,
            engine=(said.engine if said else "", support),
            lacks=said.lacks if said else (),
            gpus=len(self.config.gpus),
        )

    def telemetry(self, node: str) -> rose_pb2.HostTelemetry:
        now_s = time.monotonic()
        state = self.state
        told = self.scrape.summary(now_s) if self.scrape else self.watch.summary()
        good, bad = self.requests
        figures = rose_pb2.HostTelemetry(
            node=node,
            host=self.config.name,
            source="scrape" if self.scrape else "plugin",
            slo_good=good,
            slo_bad=bad,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            busy_ns=state.busy_ns if state else 0,
            running=state.running if state else 0,
            waiting=state.waiting if state else 0,
            ttft_target_s=self.config.ttft_target_s,
            tpot_target_s=self.config.tpot_target_s,
            kv_share=state.kv_used / state.kv_total if state and state.kv_total else None,
            gpus=len(self.config.gpus),
        )
        told.MergeFrom(figures)
        if self.scrape:
            told.running, told.waiting = self.scrape.running(now_s) or (0, 0)
            share = self.scrape.busy_share(now_s)
        else:
            share = self._load.busy_share(None if state is None else state.busy_ns)
        if share is not None:
            told.busy_share = share
        return told

    def close(self) -> None:
        """Close the control page and release the right to write grants on it, after the guard has
        ended; counters and figures keep their last values.
        """
        with self._lock:
            self._closed = True
            self.page.close()
        self._right.close()

    def _served(self, record: LatencyRecord) -> None:
        ttft_s, tpot_s = record.ttft_ns / _NS, record.tpot_ns / _NS
        if ttft_s <= self.config.ttft_target_s and tpot_s <= self.config.tpot_target_s:
            self._met += 1
        else:
            self._missed += 1
        self._prompt_tokens += record.prompt_tokens
        self._output_tokens += record.output_tokens
        if record.ttft_ns:
            self._ttft.observe(ttft_s)
        if record.tpot_ns:
            self._tpot.observe(tpot_s)


def publishers_on(page: ControlPage) -> list[int]:
    """Return the ids of the processes that publish on a page, one for each engine core; those of
    other pid namespaces are left out.
    """
    own = pid_namespace()
    return [seat.pid for seat in page.host_view().seats if seat and seat.pid_namespace == own]


def lent_on(host: HostState, gpus: int) -> HostState:
    """Return the state with the KV memory that the host lends on so many of its GPUs: the page has
    that of one.
    """
    return replace(host, bytes_lent=max(1, gpus) * host.bytes_lent)


def summed(
    hosts: Sequence[rose_pb2.HostTelemetry], left: tuple[int, int] = (0, 0)
) -> rose_pb2.HostTelemetry:
    """Return one HostTelemetry for all hosts of a node, by which capacity policies decide.

    Counts of requests and GPUs are sums, those of requests with the (met, missed) counts of hosts
    that `left`, because they must not fall. busy_share and kv_share are the largest known ones: a
    mean would lend beside a busy host whose neighbours idle. Latencies are those of the host with
    the largest ratio of a p95 latency to its target.
    """
    told = rose_pb2.HostTelemetry()
    told.CopyFrom(max(hosts, key=_strain))
    told.host = "" if len(hosts) > 1 else told.host
    sums = "busy_ns", "running", "waiting", "window_requests", "prompt_tokens", "output_tokens"
    for name in (*sums, "gpus"):
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


class HostLoad:
    """Meter of a host's busy share, computed from its counter of busy nanoseconds."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._since: tuple[int, int] | None = None
        self._share: float | None = None

    def busy_share(self, busy_ns: int | None) -> float | None:
        """Return the share of about the last second in which the host was busy (0 to 1), given its
        busy-time counter; None until there are two readings, or after the counter fell.
        """
        now_ns = self._clock_ns()
        if busy_ns is None or self._since is None or busy_ns < self._since[1]:
            self._since = None if busy_ns is None else (now_ns, busy_ns)
            self._share = None
            return None
        elapsed_ns = now_ns - self._since[0]
        if elapsed_ns >= LEAST_INTERVAL_S * 1e9:
            # A step that ends in the interval may have begun before it.
            self._share = min(1.0, (busy_ns - self._since[1]) / elapsed_ns)
            self._since = now_ns, busy_ns
        return self._share


class HostProcess:
    """Identity of the host's process, which tells it from a later process of the same pid.

    A pid that cannot be checked, because the host has its own pid namespace or /proc hides it,
    raises no doubt: the lock on the page decides then.
    """

    def __init__(self, pid: int | None) -> None:
        """Read the start time of the host's first process, `pid`; None if it is not known."""
        self._pid = pid
        self._identity = None if pid is None else ProcessIdentity.of(pid)
        self._own_namespace = pid_namespace()
        self._foreign: dict[tuple[int, int], bool] = {}

    @property
    def ended(self) -> bool:
        """True if the process named at the start has ended, even if another process has its pid
        now; False if no pid was named.
        """
        return self._pid is not None and (self._identity is None or not self._identity.running)

    def doubt(self, *seats: SeatState | None) -> FreezeReason | None:
        """Return HOST_DEAD if the host's process ended, HOST_FOREIGN if the holder of one of
        `seats` is not the named process or its descendant, None if nothing is known against the
        holders.
        """
        if self.ended:
            return FreezeReason.HOST_DEAD
        return next(filter(None, map(self._doubt_of, seats)), None)

    def _doubt_of(self, seat: SeatState | None) -> FreezeReason | None:
        if seat is None or not seat.started or seat.pid_namespace != self._own_namespace:
            return None
        stat = ProcessStat.of(seat.pid)
        if stat is None or stat.ended or stat.started != seat.started:
            # A child of a dead host may hold on to its lock.
            return FreezeReason.HOST_DEAD
        writer = seat.pid, seat.started
        if writer not in self._foreign:
            if len(self._foreign) >= MOST_CORES:
                self._foreign.clear()  # Those of earlier lives.
            self._foreign[writer] = not self._begot(seat.pid)
        return FreezeReason.HOST_FOREIGN if self._foreign[writer] else None

    def _begot(self, pid: int) -> bool:
        """Return True if `pid` is the named host process or its descendant, or if no process was
        named.
        """
        if self._pid is None:
            return True
        for _ in range(_MOST_ANCESTORS):
            if pid == self._pid:
                return True
            stat = ProcessStat.of(pid)
            if stat is None or stat.parent <= 1:
                return False
            pid = stat.parent
        return False


logger = logging.getLogger("rose.node")


def _latencies(
    requests: int, ttft_s: Sequence[float], tpot_s: Sequence[float]
) -> rose_pb2.HostTelemetry:
    """Return telemetry with the number of requests of the last `WINDOW_S` seconds and the median
    and 95th percentile of their TTFT and TPOT, given as (p50, p95) in seconds.
    """
    return rose_pb2.HostTelemetry(
        window_requests=requests,
        window_s=WINDOW_S,
        ttft_p50_s=ttft_s[0],
        ttft_p95_s=ttft_s[1],
        tpot_p50_s=tpot_s[0],
        tpot_p95_s=tpot_s[1],
    )


class HostWatch:
    """Reader of the latency ring of a control page: it writes each record to a log, passes it to
    `on_record` and keeps it for `summary`.
    """

    def __init__(
        self,
        log: JsonlLog,
        on_record: Callable[[LatencyRecord], None] = lambda _: None,
        cursor: Cursor = START,
        host: str = "",
    ) -> None:
        """Begin to read at `cursor`: an earlier daemon has read the records before it. `host`: name
        of the host that each log line carries, "" leaves it out.
        """
        self._named = {"host": host} if host else {}
        self._on_record = on_record
        self._log = log
        self._window: deque[LatencyRecord] = deque(maxlen=4_096)
        self._cursor = cursor
        self.lost = 0

    def drain(self, page: ControlPage) -> None:
        """Read the ring's new records into window and log; `lost` counts records that were
        overwritten or torn before they were read.
        """
        drained = page.latency.drain(self._cursor)
        if drained.lost and not self.lost:
            logger.warning(
                "latencies of the host were written over before they were read, or torn; they are"
                " counted as lost"
            )
        self.lost += drained.lost
        self._cursor = drained.cursor
        for record in drained.records:
            self._window.append(record)
            self._log.write(_as_json(record) | self._named)
            self._on_record(record)

    def summary(self) -> rose_pb2.HostTelemetry:
        """Return telemetry with request count, median and p95 TTFT and TPOT of the last ten
        seconds; zeros if no request finished in them.
        """
        since_ns = time.monotonic_ns() - int(WINDOW_S * _NS)
        recent = [record for record in tuple(self._window) if record.finished_ns >= since_ns]
        ttft = [record.ttft_ns / _NS for record in recent if record.ttft_ns] or [0.0]
        tpot = [record.tpot_ns / _NS for record in recent if record.tpot_ns] or [0.0]
        both = [[percentile(each, share) for share in QUANTILES] for each in (ttft, tpot)]
        return _latencies(len(recent), *both)


def _as_json(record: LatencyRecord) -> dict[str, object]:
    return {
        "request_id": record.request_id,
        "finished_s": record.finished_ns / _NS,
        "ttft_s": record.ttft_ns / _NS if record.ttft_ns else None,
        "tpot_s": record.tpot_ns / _NS if record.tpot_ns else None,
        "e2e_s": record.e2e_ns / _NS,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
    }


class HostScrape:
    """Load, latencies and met or missed requests of a host, computed from scrapes of its
    `/metrics`.

    good, bad: counts of requests that met both targets, and of those that missed one. trouble: the
    reason why the last scrape failed, "" if it did not. Times are monotonic seconds from the
    caller.
    """

    def __init__(self, ttft_s: float, tpot_s: float, model: str | None = None) -> None:
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._model = model
        self._taken: deque[tuple[float, Scrape]] = deque()
        self.good = 0
        self.bad = 0
        self.trouble = ""

    def take(self, text: str, now_s: float) -> None:
        """Parse the text of one `/metrics` reply into load and counters; text that cannot be parsed
        only sets `trouble`.
        """
        try:
            scrape = parse_scrape(text, self._model)
            if self._taken:
                self._count(scrape.since(self._taken[-1][1]))
        except ScrapeError as error:
            self.missed(str(error))
            return
        self.trouble = ""
        self._taken.append((now_s, scrape))
        while self._taken[0][0] < now_s - WINDOW_S:
            self._taken.popleft()

    def missed(self, why: str) -> None:
        """Set `trouble` to the reason why the host did not answer."""
        self.trouble = why

    def running(self, now_s: float) -> tuple[int, int] | None:
        """Return the numbers of (running, waiting) requests in the newest scrape; None if it is
        older than STALE_S.
        """
        newest = self._newest(now_s)
        return None if newest is None else (newest.running or 0, newest.waiting or 0)

    def busy_share(self, now_s: float) -> float | None:
        """Return the share of the window's scrapes in which requests ran or waited; None if the
        newest scrape is older than STALE_S.
        """
        if self._newest(now_s) is None:
            return None
        found = [bool(each.running or each.waiting) for _, each in self._taken]
        return sum(found) / len(found)

    def summary(self, now_s: float) -> rose_pb2.HostTelemetry:
        """Return telemetry with request count, median and p95 TTFT and TPOT of the last ten
        seconds, as precise as the histogram's buckets; zeros if they are unknown.
        """
        newest, window = self._newest(now_s), None
        if newest is not None and len(self._taken) > 1:
            with contextlib.suppress(ScrapeError):
                window = newest.since(self._taken[0][1])
        if newest is None or window is None:
            return _latencies(0, NO_LATENCY, NO_LATENCY)
        requests = window.ttft.count if window.ttft else 0
        return _latencies(requests, _quantiles(window.ttft), _quantiles(window.tpot or window.itl))

    def _newest(self, now_s: float) -> Scrape | None:
        at_s, scrape = self._taken[-1] if self._taken else (-math.inf, None)
        return scrape if now_s < at_s + STALE_S else None

    def _count(self, fresh: Scrape) -> None:
        # Gaps between tokens are not requests: without a mean TPOT of each request only TTFT
        # counts.
        counted = [
            (each.count, each.count - each.at_most(target_s))
            for each, target_s in ((fresh.ttft, self._ttft_s), (fresh.tpot, self._tpot_s))
            if each is not None
        ]
        requests = max((count for count, _ in counted), default=0)
        bad = min(requests, sum(missed for _, missed in counted))
        self.good += requests - bad
        self.bad += bad


def _quantiles(histogram: Histogram | None) -> Sequence[float]:
    if histogram is None:
        return NO_LATENCY
    return [histogram.quantile(share) or 0.0 for share in QUANTILES]


async def watch(
    url: str,
    scrape: HostScrape,
    http: aiohttp.ClientSession,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Scrape `url` into `scrape` once a second, for ever; a failed scrape is recorded in
    `scrape.trouble` and tried again.
    """
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    while True:
        try:
            async with http.get(url, timeout=limit) as reply:
                if reply.status != 200:
                    scrape.missed(f"{url} answers HTTP {reply.status}")
                else:
                    raw = await _read(reply)
                    scrape.take(raw.decode(errors="replace"), clock_s())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            scrape.missed(f"{url} does not answer ({error or type(error).__name__})")
        await asyncio.sleep(EVERY_S)


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for chunk in reply.content.iter_any():
        raw += chunk
        if len(raw) > MOST_BYTES:
            raise aiohttp.ClientPayloadError(f"more than {MOST_BYTES} bytes")
    return bytes(raw)
