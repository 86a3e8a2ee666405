"""What the host's users felt: the same replayed arrivals, leased against frozen."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rose.demo.harvest import block_pairs
from rose.demo.records import BlockRecord, Records
from rose.load.records import Request, join_requests
from rose.stats import (
    Estimate,
    PairedWindow,
    percentile,
    ratio_of_percentiles,
)

# Requests near the end of a block may be served in the next one, under another arm.
EDGE_S = 0.5
# Arrivals this close together share bursts and batches, so they are resampled together.
WINDOW_S = 2.0

METRICS: dict[str, Callable[[Request], float | None]] = {
    "ttft": lambda request: request.ttft_s,
    "tpot": lambda request: request.tpot_s,
}
PERCENTS = (50, 95)


@dataclass(frozen=True, slots=True)
class HostArm:
    """Latencies of one arm over the compared arrivals; failed requests count as infinitely late."""

    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    requests: int
    failed: int


@dataclass(frozen=True, slots=True)
class HostImpact:
    """Both arms, every arrival of the run, and leased over frozen for each (metric, percent)."""

    frozen: HostArm
    leased: HostArm
    all: HostArm
    ratios: dict[tuple[str, int], Estimate]
    samples: dict[str, int]


RequestPair = tuple[Request, Request]


def _comparable(leased: Request, frozen: Request) -> bool:
    """Whether both were measured by the same instrument, as far as they were served at all."""
    served = leased.status == frozen.status == "ok"
    return not served or leased.source == frozen.source


def paired_requests(records: Records, joined: Sequence[Request]) -> list[list[RequestPair]]:
    """(leased, frozen) requests of the common prefix, one list for each window of each pair."""
    by_block: dict[int, dict[float, Request]] = defaultdict(dict)
    for request in joined:
        by_block[request.block][request.offset_s] = request
    windows: dict[tuple[int, int], list[RequestPair]] = defaultdict(list)
    for leased, frozen in block_pairs(records):
        prefix_s = _prefix_s(leased, frozen)
        others = by_block[frozen.block]
        for offset_s, request in sorted(by_block[leased.block].items()):
            other = others.get(offset_s)
            if offset_s <= prefix_s and other is not None and _comparable(request, other):
                windows[leased.block, int(offset_s / WINDOW_S)].append((request, other))
    return list(windows.values())


def _prefix_s(leased: BlockRecord, frozen: BlockRecord) -> float:
    return min(leased.duration_s, frozen.duration_s) - EDGE_S


def _latency_s(request: Request, metric: str) -> float | None:
    return METRICS[metric](request) if request.status == "ok" else math.inf


def _window(pairs: Sequence[RequestPair], metric: str) -> PairedWindow:
    """Latencies of the pairs in which both sides have one."""
    both = [(_latency_s(above, metric), _latency_s(below, metric)) for above, below in pairs]
    kept = [(above, below) for above, below in both if above is not None and below is not None]
    return PairedWindow([above for above, _ in kept], [below for _, below in kept])


def _known(requests: Sequence[Request], metric: str) -> list[float]:
    found = (_latency_s(request, metric) for request in requests)
    return [latency_s for latency_s in found if latency_s is not None]


def _arm(requests: Sequence[Request], windows: dict[str, Sequence[Sequence[float]]]) -> HostArm:
    def value(metric: str, percent: int) -> float | None:
        values = [latency for window in windows[metric] for latency in window]
        return percentile(values, percent) if values else None

    return HostArm(
        ttft_p50_s=value("ttft", 50),
        ttft_p95_s=value("ttft", 95),
        tpot_p50_s=value("tpot", 50),
        tpot_p95_s=value("tpot", 95),
        requests=len(requests),
        failed=sum(request.status != "ok" for request in requests),
    )


def host_impact(records: Records, seed: int) -> HostImpact:
    """Compare the arms over all arrivals that both of them saw."""
    joined = join_requests(records.client_requests, records.host_latency)
    pairs = paired_requests(records, joined)
    windows = {
        metric: [w for w in (_window(pair, metric) for pair in pairs) if w.above]
        for metric in METRICS
    }
    ratios = {
        (metric, percent): ratio_of_percentiles(found, percent, seed)
        for metric, found in windows.items()
        for percent in PERCENTS
        if found
    }
    return HostImpact(
        frozen=_arm(
            [frozen for window in pairs for _, frozen in window],
            {metric: [w.below for w in found] for metric, found in windows.items()},
        ),
        leased=_arm(
            [leased for window in pairs for leased, _ in window],
            {metric: [w.above for w in found] for metric, found in windows.items()},
        ),
        all=_arm(joined, {metric: [_known(joined, metric)] for metric in METRICS}),
        ratios=ratios,
        samples={metric: sum(len(w.above) for w in found) for metric, found in windows.items()},
    )
