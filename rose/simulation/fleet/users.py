"""Stand-ins for a serving cluster's users, its balancer, and an autoscaler that frees whole cards.

The balancer sends a request to the host with the least work, as gateways of serving clusters do.
The autoscaler is for policies that borrow whole cards: hosts that the traffic of the last minute
does not need are free, the last ones first, and come back the moment that they are needed. That
favours these policies: a real host would have to start first.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rose.simulation.clock.event_queue import EventQueue
from rose.simulation.engine.host import ModelledHost
from rose.simulation.results import Latencies, Percentiles, SloSlice
from rose.simulation.step_times import StepWork
from rose.simulation.workload import Request
from slo import SloSpec


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest rank; all 0 without values."""
    if not values:
        return Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]

    mean = math.fsum(ordered) / len(ordered)
    return Percentiles(len(ordered), mean, at(0.5), at(0.9), at(0.99), ordered[-1])


class LatencyBook:
    """Latencies of users' requests, against their targets."""

    def __init__(self, slo: SloSpec, slice_s: float) -> None:
        self._slo = slo
        self._slice_s = slice_s
        self._slices: dict[int, list[int]] = {}
        self._ttft_s = array("d")
        self._tpot_s = array("d")
        self._attained = 0

    def served(
        self, host: int, ended_s: float, ttft_s: float, tpot_s: float, output_tokens: int
    ) -> None:
        """A request ended."""
        attained = ttft_s <= self._slo.ttft_s and tpot_s <= self._slo.tpot_s
        self._ttft_s.append(ttft_s)
        self._tpot_s.append(tpot_s)
        self._attained += attained
        counts = self._slices.setdefault(int(ended_s // self._slice_s), [0, 0])
        counts[0] += 1
        counts[1] += attained

    def latencies(self) -> Latencies:
        """All of them."""
        series = tuple(
            SloSlice(number * self._slice_s, requests, attained)
            for number, (requests, attained) in sorted(self._slices.items())
        )
        return Latencies(
            len(self._ttft_s),
            self._attained,
            percentiles(self._ttft_s),
            percentiles(self._tpot_s),
            series,
        )


class ModelledUsers:
    """Users' requests on their way to hosts; `serving` of these take new ones."""

    def __init__(
        self, queue: EventQueue, hosts: Sequence[ModelledHost], requests: Iterator[Request]
    ) -> None:
        self._queue = queue
        self._hosts = hosts
        self._requests = requests
        self.serving = len(hosts)
        self.on_arrival: Callable[[Request], None] | None = None
        # Longer than a host's whole KV memory: it would wait for ever.
        self.refused = 0

    def start(self) -> None:
        """Let the first request come."""
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            due_ns = round(request.arrival_s * 1e9)
            self._queue.at_ns(due_ns, lambda: self._arrived(request))

    def _arrived(self, request: Request) -> None:
        most = self._hosts[0].spec.kv_tokens
        if request.prompt_tokens + request.output_tokens > most:
            self.refused += 1
        else:
            if self.on_arrival is not None:
                self.on_arrival(request)
            self._host_of(request).serve(request)
        self._next()

    def _host_of(self, request: Request) -> ModelledHost:
        if request.host is not None and request.host < self.serving:
            return self._hosts[request.host]
        return min(self._hosts[: self.serving], key=_load)


def _load(host: ModelledHost) -> tuple[int, int]:
    return len(host.waiting) + host.running, host.index


WINDOW_S = 60.0
LOOK_S = 1.0
# A host is planned to be full to this share: serving autoscalers keep room for bursts.
TARGET_SHARE = 0.6


class ModelledAutoscaler:
    """Says which hosts the traffic needs; `on_change` hears of a host that is freed or needed."""

    def __init__(
        self,
        queue: EventQueue,
        users: ModelledUsers,
        hosts: Sequence[ModelledHost],
        on_change: Callable[[int, bool], None],
    ) -> None:
        """on_change: called with the host's index, and whether its card is free."""
        self._queue = queue
        self._users = users
        self._hosts = hosts
        self._on_change = on_change
        self._work_s = 0.0
        self._needed: deque[tuple[float, int]] = deque()
        self._free: set[int] = set()
        steps, spec = hosts[0].spec.steps, hosts[0].spec
        chunk = spec.max_step_tokens
        batch = 32
        self._prefill_s = steps.seconds(StepWork(chunk, 0, 1, 0)) / chunk
        self._token_s = steps.seconds(StepWork(0, batch, 0, batch * 1_024)) / batch
        users.on_arrival = self._arrived

    def start(self) -> None:
        """Begin to look."""
        self._queue.every_s(LOOK_S, self._look, 0.0023)

    def _arrived(self, request: Request) -> None:
        self._work_s += request.prompt_tokens * self._prefill_s
        self._work_s += request.output_tokens * self._token_s

    def _look(self) -> None:
        now_s = self._queue.now_s
        share, self._work_s = self._work_s / LOOK_S, 0.0
        running = sum(len(host.waiting) + host.running for host in self._hosts)
        by_rate = share / TARGET_SHARE
        needed = max(1, math.ceil(by_rate), math.ceil(running / 48))
        self._needed.append((now_s, min(len(self._hosts), needed)))
        while self._needed[0][0] < now_s - WINDOW_S:
            self._needed.popleft()
        settled = now_s >= WINDOW_S
        most = max(each for _, each in self._needed) if settled else len(self._hosts)
        self._users.serving = most
        for index in range(len(self._hosts)):
            wanted = index < most
            if wanted and index in self._free:
                self._free.discard(index)
                self._on_change(index, False)
            elif not wanted and index not in self._free and self._hosts[index].idle:
                self._free.add(index)
                self._on_change(index, True)
