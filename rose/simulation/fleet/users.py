"""Stand-ins for a serving cluster's users, its balancer, and an autoscaler that frees whole cards.

The balancer sends a request to the host with the least work, as gateways of serving clusters do.
The autoscaler is for policies that borrow whole cards: hosts that it scales down are free, the last
ones first, and serve again the moment that it scales up. This favours these policies: a real host
would have to start first.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.card import HOST
from rose.simulation.engine.host import ModelledHost
from rose.simulation.workloads.traffic import UserRequest

# Kubernetes' horizontal autoscaler by default: it looks every 15 s, and goes down only to what was
# enough for all of the last 5 minutes.
SYNC_S = 15.0
STABLE_S = 300.0
# GPU utilisation that it aims at: serving clusters keep room for bursts.
TARGET_SHARE = 0.6


class ModelledUsers:
    """Users whose requests go to the least loaded of the first `serving` hosts."""

    def __init__(
        self, queue: EventQueue, hosts: Sequence[ModelledHost], requests: Iterator[UserRequest]
    ) -> None:
        self._queue = queue
        self._hosts = hosts
        self._requests = requests
        self.serving = len(hosts)
        # Requests longer than a host's whole KV memory, which would wait for ever.
        self.refused = 0

    def start(self) -> None:
        """Schedule the next request at its arrival time; each arrival schedules the next."""
        request = next(self._requests, None)
        if request is not None:
            due_ns = round(request.arrival_s * 1e9)
            self._queue.at_ns(due_ns, lambda: self._arrived(request))

    def _arrived(self, request: UserRequest) -> None:
        most = self._hosts[0].spec.kv_tokens
        if request.prompt_tokens + request.output_tokens > most:
            self.refused += 1
        else:
            min(self._hosts[: self.serving], key=_load).serve(request)
        self.start()


def _load(host: ModelledHost) -> tuple[int, int]:
    return len(host.waiting) + host.running, host.index


class ModelledAutoscaler:
    """Model of Kubernetes' autoscaler over the hosts: it decides how many of them the traffic
    needs.

    Its rule: replicas × utilisation ÷ target, rounded up; utilisation is the share of time in which
    a host's card is inside a step of its own, as a GPU's duty cycle is measured.
    """

    def __init__(
        self,
        queue: EventQueue,
        users: ModelledUsers,
        hosts: Sequence[ModelledHost],
        on_change: Callable[[int, bool], None],
    ) -> None:
        """Create the autoscaler.

        on_change: called with a host's index, and True when its card becomes free, False when it is
        needed.
        """
        self._queue = queue
        self._users = users
        self._hosts = hosts
        self._on_change = on_change
        self._busy_ns = 0
        self._needed: deque[tuple[float, int]] = deque()
        self._free: set[int] = set()

    def start(self) -> None:
        """Schedule the autoscaler's decision every SYNC_S seconds."""
        self._queue.every_s(SYNC_S, self._look, 0.0023)

    def _look(self) -> None:
        now_s, users = self._queue.now_s, self._users
        busy_ns = sum(host.card.busy_until_now_ns(HOST) for host in self._hosts)
        share = (busy_ns - self._busy_ns) / NS / SYNC_S / users.serving
        self._busy_ns = busy_ns
        needed = math.ceil(users.serving * share / TARGET_SHARE)
        self._needed.append((now_s, min(len(self._hosts), max(1, needed))))
        while self._needed[0][0] < now_s - STABLE_S:
            self._needed.popleft()
        settled = now_s >= STABLE_S
        most = max(each for _, each in self._needed)
        users.serving = most if settled else len(self._hosts)
        for index, host in enumerate(self._hosts):
            wanted = index < users.serving
            if wanted and index in self._free:
                self._free.discard(index)
                self._on_change(index, False)
            elif not wanted and index not in self._free and host.idle:
                self._free.add(index)
                self._on_change(index, True)
