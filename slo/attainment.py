"""How many requests met their targets."""

from collections.abc import Iterable
from dataclasses import dataclass

from slo.latency import RequestLatency
from slo.spec import SloSpec


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts over a set of requests; `good` met both targets."""

    requests: int
    good: int
    ttft_met: int
    tpot_met: int

    @property
    def fraction(self) -> float:
        """Share of good requests; 1 without requests, since none was missed."""
        return self.good / self.requests if self.requests else 1.0

    def holds(self, spec: SloSpec) -> bool:
        """Whether at least the spec's percentile of the requests were good."""
        return self.good >= spec.percentile * self.requests


def attainment(latencies: Iterable[RequestLatency], spec: SloSpec) -> Attainment:
    """Exact attainment of `spec`, counted request by request."""
    requests = good = ttft_met = tpot_met = 0
    for latency in latencies:
        in_ttft = latency.ttft_s <= spec.ttft_s
        in_tpot = latency.tpot_s <= spec.tpot_s
        requests += 1
        ttft_met += in_ttft
        tpot_met += in_tpot
        good += in_ttft and in_tpot
    return Attainment(requests, good, ttft_met, tpot_met)


def goodput_rps(latencies: Iterable[RequestLatency], spec: SloSpec, window_s: float) -> float:
    """Requests a second that met both targets; raises ValueError unless `window_s` is positive."""
    if window_s <= 0:
        raise ValueError(
            f"window_s is {window_s}; give the seconds the requests were collected over"
        )
    return attainment(latencies, spec).good / window_s
