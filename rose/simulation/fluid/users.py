"""Fluid's view of users: each request's time to its first token, and per token after it.

Requests are handed out one by one, to the host whose prompts are computed first; how busy hosts are
otherwise comes from the pool's state. Where in another step a request arrives follows a sequence
that covers 0 to 1 evenly (multiples of the golden ratio), so that nothing here is drawn.
"""

import heapq
import math
from collections import Counter
from dataclasses import dataclass

from rose.simulation.cluster import EngineSpec
from rose.simulation.results import Latencies, Percentiles, SloSlice
from rose.simulation.workload import Request
from slo import SloSpec, StepProfile

_GOLDEN = (math.sqrt(5) - 1) / 2
_BUCKETS_PER_DOUBLING = 36
_LEAST_S = 2.0**-20


@dataclass(frozen=True, slots=True)
class HostMoment:
    """Hosts of a pool at one moment.

    busy: share of time inside a step; step_s: of a decode step; token_s: of a token, with the steps
    that others' prompts make longer; speed: of the card that a working
    host has; guest_step_s: of a guest that computes in the hosts' idle time, 0 without one;
    queue_s: that a request waits until any host has room for it.
    """

    busy: float
    step_s: float
    token_s: float
    speed: float = 1.0
    guest_step_s: float = 0.0
    queue_s: float = 0.0


class Summary:
    """Percentiles of any number of latencies, within 1% (DDSketch, Masson et al., VLDB 2019).

    A bucket is 1/36 of a doubling wide, so the nearest value in it is off by 0.963% at most.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._most = 0.0
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Count one value, finite and not negative."""
        self._counts[math.floor(math.log2(max(value, _LEAST_S)) * _BUCKETS_PER_DOUBLING)] += 1
        self._sum += value
        self._count += 1
        self._most = max(self._most, value)

    def percentiles(self) -> Percentiles:
        """Return the percentiles of all values so far; all 0 without any."""
        if not self._count:
            return Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = map(self._quantile, (0.5, 0.9, 0.99))
        return Percentiles(self._count, self._sum / self._count, p50, p90, p99, self._most)

    def _quantile(self, fraction: float) -> float:
        rank, growth = fraction * self._count - 1e-9, math.exp2(1 / _BUCKETS_PER_DOUBLING)
        below = 0
        for index in sorted(self._counts):
            below += self._counts[index]
            if below >= rank:
                break
        # The harmonic mean of both edges is equally far, relatively, from either.
        return math.exp2(index / _BUCKETS_PER_DOUBLING) * 2 * growth / (1 + growth)


class UserLatencies:
    """Latencies of all requests of a run, in bounded memory."""

    def __init__(
        self, engine: EngineSpec, profile: StepProfile, hosts: int, slo: SloSpec, slice_s: float
    ) -> None:
        self._engine = engine
        self._profile = profile
        self._free_s = [0.0] * hosts
        self._slo = slo
        self._slice_s = slice_s
        self._ttft, self._tpot = Summary(), Summary()
        self._turn = 0.5
        self._requests = self._attained = 0
        self._slices: list[SloSlice] = []

    def serve(self, request: Request, now: HostMoment) -> float:
        """Take one request, in order of arrival; its time to the first token."""
        self._turn = (self._turn + _GOLDEN) % 1.0
        begin_s = max(request.arrival_s + now.queue_s, self._free_s[0])
        # In a step of the host's own it waits for the rest of it; else for none, but a guest that
        # is in a step has half of the card until that ends.
        in_step = self._turn < now.busy
        chunks = -(-request.prompt_tokens // self._engine.max_step_tokens)
        prefill_s = chunks * (now.step_s if in_step else self._profile.base_s / now.speed)
        prefill_s += request.prompt_tokens * self._profile.per_token_s / now.speed
        if in_step:
            begin_s = max(begin_s, request.arrival_s + self._turn / now.busy * now.step_s)
        else:
            rest = (self._turn - now.busy) / max(1e-9, 1 - now.busy)
            prefill_s += min(prefill_s, rest * now.guest_step_s)
        heapq.heapreplace(self._free_s, begin_s + prefill_s)
        ttft_s = begin_s + prefill_s - request.arrival_s
        self._count(request, ttft_s, now.token_s)
        return ttft_s

    def backlog_s(self, now_s: float) -> float:
        """Return the seconds that a host still computes present prompts, averaged over hosts."""
        return sum(max(0.0, free_s - now_s) for free_s in self._free_s) / len(self._free_s)

    def _count(self, request: Request, ttft_s: float, tpot_s: float) -> None:
        self._ttft.add(ttft_s)
        if request.output_tokens > 1:
            self._tpot.add(tpot_s)
        good = _within(ttft_s, self._slo.ttft_s) and _within(tpot_s, self._slo.tpot_s)
        self._requests += 1
        self._attained += good
        start_s = request.arrival_s // self._slice_s * self._slice_s
        if not self._slices or self._slices[-1].start_s < start_s:
            self._slices.append(SloSlice(start_s, 0, 0))
        last = self._slices[-1]
        self._slices[-1] = SloSlice(last.start_s, last.requests + 1, last.attained + good)

    def latencies(self) -> Latencies:
        """Return the latencies of all requests so far."""
        return Latencies(
            self._requests,
            self._attained,
            self._ttft.percentiles(),
            self._tpot.percentiles(),
            tuple(self._slices),
        )


def _within(value_s: float, target_s: float | None) -> bool:
    return target_s is None or value_s <= target_s
