"""The same arrivals in two arms, window by window."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.load.protocol import Request
from rose.compare.bootstrap import Estimate, PairedWindow, ratio_of_percentiles
from slo import RequestLatency

METRICS: dict[str, Callable[[Request], float | None]] = {
    "ttft": lambda request: request.ttft_s,
    "tpot": lambda request: request.tpot_s,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One arrival: in the arm, and alone."""

    arm: Request
    alone: Request

    @property
    def both_digests(self) -> bool:
        """True if the tokens of both answers are known."""
        return None not in (self.arm.output_digest, self.alone.output_digest)

    @property
    def mismatch(self) -> bool:
        """True if the answers differ in a token."""
        return self.both_digests and self.arm.output_digest != self.alone.output_digest


Window = list[Pair]


class Played(Protocol):
    """A stretch of time in which one arm had the host's load."""

    @property
    def block(self) -> int: ...

    @property
    def duration_s(self) -> float: ...


class RequestIndex:
    """Requests by block and offset."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._by_block: dict[int, dict[float, Request]] = defaultdict(dict)
        for request in requests:
            self._by_block[request.block][request.offset_s] = request

    def of(self, block: Played) -> list[Request]:
        """Return requests that arrived while the block lasted, in order of time."""
        found = self._by_block[block.block]
        return [found[at] for at in sorted(found) if at < block.duration_s]

    def windows(self, arm: Played, alone: Played, window_s: float) -> list[Window]:
        """Return arrivals that both blocks saw, grouped by time."""
        others = {request.offset_s: request for request in self.of(alone)}
        grouped: dict[int, Window] = defaultdict(list)
        for request in self.of(arm):
            if (other := others.get(request.offset_s)) is not None:
                grouped[int(request.offset_s / window_s)].append(Pair(request, other))
        return list(grouped.values())


def latency_s(request: Request, metric: str) -> float | None:
    """Return a latency: infinity for a failed request, None where none was measured."""
    return METRICS[metric](request) if request.status == "ok" else math.inf


def slo_latency(request: Request) -> RequestLatency:
    """Return latencies for counting attainment: a failed request meets no target."""
    ok = request.status == "ok" and request.ttft_s is not None
    return RequestLatency(
        request_id=request.request_id,
        ttft_s=request.ttft_s if ok and request.ttft_s is not None else math.inf,
        tpot_s=(request.tpot_s or 0.0) if ok else math.inf,
        e2e_s=request.e2e_s if request.e2e_s is not None else math.inf,
        prompt_tokens=request.prompt_tokens or 0,
        output_tokens=request.output_tokens,
    )


def paired_window(window: Window, metric: str) -> PairedWindow:
    """Return latencies of the pairs in which both sides have one."""
    both = [(latency_s(pair.arm, metric), latency_s(pair.alone, metric)) for pair in window]
    kept = [(above, below) for above, below in both if above is not None and below is not None]
    return PairedWindow([above for above, _ in kept], [below for _, below in kept])


def percentile_ratio(
    windows: Sequence[Window], metric: str, percent: float, seed: int
) -> Estimate | None:
    """Return percentile in the arm over the one alone; None when nothing can be compared."""
    found = [paired for window in windows if (paired := paired_window(window, metric)).above]
    return ratio_of_percentiles(found, percent, seed) if found else None
