"""Watch over a host without the plugin, through its `/metrics`.

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
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import aiohttp

from rose.node.grants.host_watch import HostSummary
from slo import Histogram, Scrape, ScrapeError, parse_scrape

EVERY_S: Final = 1.0
TIMEOUT_S: Final = 2.0
MOST_BYTES: Final = 8 << 20
WINDOW_S: Final = 10.0
# Older figures are nobody's: stale data is no data.
STALE_S: Final = 5.0


class HostScrape:
    """Figures of a host from its scrapes; times are monotonic seconds, handed in."""

    def __init__(self, ttft_s: float, tpot_s: float, model: str | None = None) -> None:
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._model = model
        self._taken: deque[tuple[float, Scrape]] = deque()
        self.good = 0
        self.bad = 0
        self.trouble = ""

    def take(self, text: str, now_s: float) -> None:
        """Read one exposition. What cannot be read is `trouble`, in a line, and counts nothing."""
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
        """Record that the host did not answer."""
        self.trouble = why

    def running(self, now_s: float) -> tuple[int, int] | None:
        """Return the running and the waiting requests; None while unknown."""
        newest = self._newest(now_s)
        return None if newest is None else (newest.running or 0, newest.waiting or 0)

    def busy_share(self, now_s: float) -> float | None:
        """Return the share of the window's scrapes that found work; None while unknown."""
        if self._newest(now_s) is None:
            return None
        found = [bool(each.running or each.waiting) for _, each in self._taken]
        return sum(found) / len(found)

    def summary(self, now_s: float) -> HostSummary:
        """Return the latencies of the window, to the precision of the buckets."""
        newest = self._newest(now_s)
        if newest is None or len(self._taken) < 2:
            return HostSummary()
        try:
            window = newest.since(self._taken[0][1])
        except ScrapeError:
            return HostSummary()
        tpot = window.tpot or window.itl
        return HostSummary(
            requests=window.ttft.count if window.ttft else 0,
            ttft_p50_s=_quantile(window.ttft, 0.5),
            ttft_p95_s=_quantile(window.ttft, 0.95),
            tpot_p50_s=_quantile(tpot, 0.5),
            tpot_p95_s=_quantile(tpot, 0.95),
        )

    def _newest(self, now_s: float) -> Scrape | None:
        at_s, scrape = self._taken[-1] if self._taken else (-math.inf, None)
        return scrape if now_s < at_s + STALE_S else None

    def _count(self, fresh: Scrape) -> None:
        # Gaps between tokens are no requests: without a mean of each only TTFT counts.
        counted = [
            (each.count, each.count - each.at_most(target_s))
            for each, target_s in ((fresh.ttft, self._ttft_s), (fresh.tpot, self._tpot_s))
            if each is not None
        ]
        requests = max((count for count, _ in counted), default=0)
        bad = min(requests, sum(missed for _, missed in counted))
        self.good += requests - bad
        self.bad += bad


def _quantile(histogram: Histogram | None, fraction: float) -> float:
    return (histogram.quantile(fraction) or 0.0) if histogram is not None else 0.0


async def watch(
    url: str,
    scrape: HostScrape,
    http: aiohttp.ClientSession,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Scrape every second until cancelled. A host that does not answer is asked again."""
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
