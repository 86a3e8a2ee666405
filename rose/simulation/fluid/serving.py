"""Fluid of a scenario's serving cluster: a clock that goes from window to window of traffic.

It says what share of their cards the guests have. Beside an idle host a guest has all of it. Beside
a busy one it has half, while the host's slack is longer than a step of the guest (the gate's rule),
and nothing otherwise; the host then goes on at half of its speed.
"""

from collections.abc import Iterator

from elastic_scheduler.capacity.budget_hold import BusyHold, BusySeen, JudgeBusy
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.simulation.cluster import HostPool
from rose.simulation.fluid.host_pool import GuestLoad, HostPoolFluid, UserMix
from rose.simulation.fluid.users import HostMoment, UserLatencies
from rose.simulation.results import Latencies
from rose.simulation.step_times import profile_of
from rose.simulation.workload import Request

WINDOW_S = 1.0
# The gate's margin, which it leaves of every slack.
MARGIN_S = 0.002
# Two tenants of a card in a step at once have half of it each.
SHARED_SPEED = 0.5
_FIRST_MIX = UserMix(1_000.0, 100.0)
_POOL = "pool"


NO_GUEST = GuestLoad(0.0, 0.0)


class ServingFluid:
    """Hosts under a stream of requests, advanced window by window."""

    def __init__(
        self,
        pool: HostPool,
        requests: Iterator[Request],
        slice_s: float,
        hold: MaxHostBusy | None = None,
    ) -> None:
        """hold: of a capacity policy, beside how busy a host nothing is lent; None: no limit."""
        self._pool = pool
        self._requests = requests
        self._next = next(requests, None)
        profile = profile_of(pool.engine.steps)
        self._fluid = HostPoolFluid(pool.engine, profile, pool.hosts, _FIRST_MIX)
        self._users = UserLatencies(pool.engine, profile, pool.hosts, pool.slo, slice_s)
        self._prompt = self._output = 0.0
        self._count = 0
        self._share = 1.0
        self._hold = hold
        # Hosts are alike here, so one stands for all of them.
        self._busy_hold = BusyHold()
        self.over = self._next is None
        self.requests = 0
        self.now_s = 0.0
        self.busy_s = 0.0
        self._taken_s = 0.0
        # Card time of a guest, and the time in which it was held.
        self.lent_s = self.held_s = 0.0
        self.in_host_s = 0.0

    def share_at(self, time_s: float, guests: GuestLoad) -> float:
        """Share of a card that a guest has at that time, which never goes back."""
        while self.now_s + WINDOW_S <= time_s:
            self._window(guests)
        return self._share

    def advance(self, time_s: float, guests: GuestLoad = NO_GUEST) -> None:
        """Let time pass until then."""
        self.share_at(time_s, guests)

    def taken_busy_s(self) -> float:
        """Busy time of a host since this was last asked."""
        found, self._taken_s = self.busy_s - self._taken_s, self.busy_s
        return found

    @property
    def mix(self) -> UserMix:
        """Mean lengths of the requests so far."""
        return self._fluid.mix

    def latencies(self) -> Latencies:
        """Return the users' latencies so far."""
        return self._users.latencies()

    def _window(self, guests: GuestLoad) -> None:
        end_s = self.now_s + WINDOW_S
        arrived: list[Request] = []
        while self._next is not None and self._next.arrival_s < end_s:
            arrived.append(self._next)
            self._next = next(self._requests, None)
        for request in arrived:
            self._prompt += request.prompt_tokens
            self._output += request.output_tokens
        self._count += len(arrived)
        fluid = self._fluid
        if self._count:
            fluid.serve(UserMix(self._prompt / self._count, self._output / self._count))
        beside = self._beside_busy(guests.step_s)
        held = self._held()
        duty = 0.0 if held else guests.duty
        speed = 1.0 - (1.0 - SHARED_SPEED) * duty * beside
        busy = fluid.advance(len(arrived) / WINDOW_S, WINDOW_S, speed)
        self._share = 0.0 if held else (1.0 - busy) + busy * SHARED_SPEED * beside
        self.busy_s += busy * WINDOW_S
        self.lent_s += self._share * duty * WINDOW_S
        self.held_s += held * WINDOW_S
        self.in_host_s += fluid.in_host * WINDOW_S
        self._busy_hold.step(BusySeen(_POOL, busy), end_s)
        queue_s = fluid.queued / (fluid.capacity_rps(speed) * self._pool.hosts)
        step_s = fluid.step_s(speed)
        token_s = fluid.token_s(speed)
        moment = HostMoment(busy, step_s, token_s, speed, guests.step_s * duty, queue_s)
        for request in arrived:
            self._users.serve(request, moment)
        self.now_s = end_s
        self.requests = self._count
        self.over = self._next is None

    def _held(self) -> bool:
        """Return True if production's hold of busy hosts holds this one now."""
        if self._hold is None:
            return False
        self._busy_hold.step(JudgeBusy({_POOL: self._hold}), self.now_s)
        return _POOL in self._busy_hold.status()

    def _beside_busy(self, guest_step_s: float) -> float:
        """1 where a guest's step fits into what the gate lends of a busy host's slack, else 0."""
        guest = self._pool.guest
        if guest is None or guest.slack_share <= 0 or guest_step_s <= 0:
            return 0.0
        step_s = self._fluid.step_s(SHARED_SPEED)
        slo = self._pool.slo
        # The first of the prompts that wait has waited for about as long as the last one will.
        prefill_s = slo.ttft_s - self._users.backlog_s(self.now_s) - step_s
        slack_s = min(slo.tpot_s - step_s, prefill_s) - MARGIN_S
        return float(guest.slack_share * slack_s > guest_step_s)
