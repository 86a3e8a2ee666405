"""Latencies of one finished request, and attainment: how many requests met their targets."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from slo.targets import SloSpec


class Met(NamedTuple):
    """Targets that one request met; a target that nobody promised is met."""

    ttft: bool
    tpot: bool
    itl: bool
    e2e: bool


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Measured times of a finished request; `tpot_s` is 0 with fewer than two tokens.

    `itl_max_s` is the longest gap between two tokens, None where gaps were not measured.
    """

    request_id: str
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    itl_max_s: float | None = None

    def met(self, spec: SloSpec) -> Met:
        """Each target for itself; raises ValueError for an ITL target without measured gaps."""
        if spec.itl_s is not None and self.itl_max_s is None:
            raise ValueError(
                f"request {self.request_id!r} has no itl_max_s, but {spec.model!r} has an ITL "
                "target; measure token gaps or drop itl_s"
            )
        return Met(
            ttft=self.ttft_s <= spec.ttft_s,
            tpot=self.tpot_s <= spec.tpot_s,
            itl=spec.itl_s is None or self.itl_max_s is None or self.itl_max_s <= spec.itl_s,
            e2e=spec.e2e_s is None or self.e2e_s <= spec.e2e_s,
        )

    def meets(self, spec: SloSpec) -> bool:
        """Return True if the request meets every target. Raises as `met` does."""
        return all(self.met(spec))


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts over a set of requests; `good` met every target. Add two to count both sets."""

    requests: int = 0
    good: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    itl_met: int = 0
    e2e_met: int = 0

    @property
    def bad(self) -> int:
        """Requests that missed at least one target."""
        return self.requests - self.good

    @property
    def fraction(self) -> float:
        """Share of good requests; 1 without requests, since none was missed."""
        return self.good / self.requests if self.requests else 1.0

    def holds(self, spec: SloSpec) -> bool:
        """Return True if at least the spec's percentile of the requests were good."""
        return self.good >= spec.percentile * self.requests

    def __add__(self, other: "Attainment") -> "Attainment":
        return Attainment(
            self.requests + other.requests,
            self.good + other.good,
            self.ttft_met + other.ttft_met,
            self.tpot_met + other.tpot_met,
            self.itl_met + other.itl_met,
            self.e2e_met + other.e2e_met,
        )


def attainment(latencies: Iterable[RequestLatency], spec: SloSpec) -> Attainment:
    """Exact attainment of `spec`, counted request by request; raises as `RequestLatency.met`."""
    requests = good = ttft_met = tpot_met = itl_met = e2e_met = 0
    for latency in latencies:
        met = latency.met(spec)
        requests += 1
        good += all(met)
        ttft_met += met.ttft
        tpot_met += met.tpot
        itl_met += met.itl
        e2e_met += met.e2e
    return Attainment(requests, good, ttft_met, tpot_met, itl_met, e2e_met)


def goodput_rps(latencies: Iterable[RequestLatency], spec: SloSpec, window_s: float) -> float:
    """Requests a second that met every target (DistServe, OSDI 2024).

    Raises ValueError unless `window_s` is positive.
    """
    if window_s <= 0:
        raise ValueError(
            f"window_s is {window_s}; give the seconds the requests were collected over"
        )
    return attainment(latencies, spec).good / window_s
