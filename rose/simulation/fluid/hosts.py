"""Fluid of serving hosts: how busy users keep them, how long users wait, what share guests get.

The state is the mean number of requests in a host, n. They come at rate λ and stay T(n) seconds:

    dn/dt = λ − n ÷ T(n)        busy share of hosts = E[min(M, hosts)] ÷ hosts

M, the number in all of them, is Poisson of mean n × hosts, since requests are served side by side
(an M/G/∞ queue); a balancer gives each to a host that has the fewest, so none is idle while another
has two.
T(n) = (prefill + output tokens × step(n)) ÷ (1 − λ × prefill): all sequences of a step wait for the
prompts that others bring into it.

Requests are handed out one by one, to the host whose prompts are computed first; how busy hosts are
otherwise comes from the pool's state. The point of another step at which a request arrives follows
a sequence that covers 0 to 1 evenly (multiples of the golden ratio), so nothing here is random.

Beside an idle host a guest has all of its card. Beside a busy one it has half, while the host's
slack is longer than a step of the guest (the gate's rule), and nothing otherwise; the host then
goes on at half of its speed.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as checked_dataclass

from elastic_scheduler.capacity.budget_hold import BusyHold
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.simulation.checked import CHECKED, Positive
from rose.simulation.engine_specs import EngineFigures
from rose.simulation.results import LatencyBook, UserLatencies
from rose.simulation.scenario import HostPool
from rose.simulation.workloads.traffic import UserRequest
from slo import StepProfile

# Largest share of its time that a host spends on prompts.
_MOST_PREFILL_SHARE = 0.95
_ROUNDS = 12
_CLOSE = 1e-3
# With more hosts the Poisson distribution is computed as a normal one.
_MANY_HOSTS = 40
_GOLDEN = (math.sqrt(5) - 1) / 2
WINDOW_S = 1.0
# The gate's margin, which it leaves of every slack.
MARGIN_S = 0.002
# Two tenants of a card in a step at once have half of it each.
SHARED_SPEED = 0.5
_POOL = "pool"


@dataclass(frozen=True, slots=True)
class StepLine:
    """Time of an engine's step as a line: `base_s` + n × `per_sequence_s` for n decoding sequences.

    prefill_s_per_token: seconds for each token of a prompt, in whatever step it is computed.
    """

    base_s: float
    per_sequence_s: float
    prefill_s_per_token: float

    @classmethod
    def of(
        cls, profile: StepProfile, context_tokens: float, prefill_per_output: float
    ) -> "StepLine":
        """Return the line of a step profile at a mean context.

        prefill_per_output: prompt tokens that come with each output token.
        """
        per_token_s = profile.per_token_s
        return cls(
            profile.base_s,
            per_token_s * (1 + prefill_per_output)
            + profile.per_sequence_s
            + profile.per_context_token_s * context_tokens,
            per_token_s,
        )

    def seconds(self, sequences: float) -> float:
        """Return the seconds of a step with this many decoding sequences; fractions are means."""
        return self.base_s + self.per_sequence_s * sequences


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class UserMix:
    """Mean lengths of users' requests in tokens."""

    prompt_tokens: Positive
    output_tokens: Positive

    @property
    def context(self) -> float:
        """Mean number of tokens in a request's context while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class GuestDuty:
    """Load of guests at one moment.

    duty: share of the time in which they have something to do. step_s: length of their steps.
    """

    duty: float
    step_s: float


NO_GUEST = GuestDuty(0.0, 0.0)


class HostPoolFluid:
    """Fluid model of equal hosts under users' traffic: the mean number of requests in a host,
    advanced by the caller's clock.

    speed: share of the card's speed that the hosts have while they work, below 1 if a guest
    computes beside them. queued: requests that no host has room for.
    """

    def __init__(self, engine: EngineFigures, hosts: float, mix: UserMix) -> None:
        self._engine = engine
        self._hosts = hosts
        self.in_host = 0.0
        self.queued = 0.0
        # Share of a host's time, in the last stretch, that went to prompts.
        self.prefill_share = 0.0
        self.serve(mix)

    def serve(self, mix: UserMix) -> None:
        """Set the mean lengths of users' requests from now on."""
        self.mix = mix
        engine = self._engine
        self._line = StepLine.of(engine.profile, mix.context, 0.0)
        self._most = min(engine.max_sequences, max(1.0, engine.kv_tokens / mix.context))

    @property
    def busy(self) -> float:
        """Share of a host's time that is inside a step, from 0 to 1."""
        return busy_share(self.in_host, self._hosts)

    @property
    def prefill_s(self) -> float:
        """Seconds that a prompt of mean length takes alone."""
        return self.mix.prompt_tokens * self._line.prefill_s_per_token

    def step_s(self, speed: float = 1.0) -> float:
        """Return the seconds of a decode step of a busy host."""
        busy = self.busy
        return self._line.seconds(self.in_host / busy if busy > 1e-9 else 1.0) / speed

    def token_s(self, speed: float = 1.0) -> float:
        """Return the mean seconds between two tokens of a request, the prompts of others in its
        steps included.
        """
        step_s = self.step_s(speed)
        most_s = self._engine.max_step_tokens * self._line.prefill_s_per_token / speed
        return min(step_s / (1 - self.prefill_share), step_s + most_s)

    def stay_s(self, rate_per_s: float, in_host: float, speed: float = 1.0) -> float:
        """Return the seconds that a request stays in a host, at a rate for each host and a mean
        number of requests in it.
        """
        beside = in_host / max(1e-12, busy_share(in_host, self._hosts)) if in_host else 1.0
        step_s = self._line.seconds(max(1.0, beside)) / speed
        prefill_s = self.prefill_s / speed
        share = min(_MOST_PREFILL_SHARE, rate_per_s * prefill_s)
        return (prefill_s + self.mix.output_tokens * step_s) / (1 - share)

    def capacity_rps(self, speed: float = 1.0) -> float:
        """Return the most requests per second that one host can serve, with its largest batch."""
        step_s = self._line.seconds(self._most) / speed
        return 1.0 / (self.mix.output_tokens * step_s / self._most + self.prefill_s / speed)

    def advance(self, rate_per_s: float, seconds: float, speed: float = 1.0) -> float:
        """Advance the pool by `seconds` at `rate_per_s` requests for all hosts; return the busy
        share of that time.

        The state relaxes towards its equilibrium at the rate at which requests leave.
        """
        per_host = rate_per_s / self._hosts
        waiting_rate = self.queued / self._hosts / seconds
        offered = per_host + waiting_rate
        accepted = min(offered, 0.999 * self.capacity_rps(speed))
        self.queued = max(0.0, (offered - accepted) * seconds * self._hosts)
        before = self.in_host
        stay_s = self.stay_s(accepted, before, speed)
        settled = self.settled(accepted, speed)
        left = math.exp(-seconds / stay_s)
        self.in_host = min(self._most, settled + (before - settled) * left)
        mean = min(self._most, settled + (before - settled) * (1 - left) * stay_s / seconds)
        self.prefill_share = min(_MOST_PREFILL_SHARE, accepted * self.prefill_s / speed)
        return busy_share(mean, self._hosts)

    def settled(self, rate_per_s: float, speed: float = 1.0) -> float:
        """Return the mean number of requests in a host in the long run, at a rate of `rate_per_s`
        for each host.
        """
        if rate_per_s <= 0:
            return 0.0
        settled = self.in_host
        for _ in range(_ROUNDS):
            before, settled = (
                settled,
                min(self._most, rate_per_s * self.stay_s(rate_per_s, settled, speed)),
            )
            if abs(settled - before) <= _CLOSE * settled:
                return settled
        low, high = 0.0, self._most
        if rate_per_s * self.stay_s(rate_per_s, high, speed) >= high:
            return high
        # n ÷ stay(n) rises with n, so there is one point where as many leave as come.
        for _ in range(2 * _ROUNDS):
            middle = (low + high) / 2
            if rate_per_s * self.stay_s(rate_per_s, middle, speed) > middle:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def busy_share(in_host: float, hosts: float) -> float:
    """Return the share of hosts that have at least one request, for a mean of `in_host` requests in
    a host, spread evenly.
    """
    mean = in_host * hosts
    if mean <= 0:
        return 0.0
    if hosts >= _MANY_HOSTS:
        sigma = math.sqrt(mean)
        z = (hosts - mean) / sigma
        below = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return min(1.0, max(0.0, 1 - ((hosts - mean) * below + sigma * density) / hosts))
    idle, chance = 0.0, math.exp(-mean)
    for number in range(math.ceil(hosts)):
        idle += (hosts - number) * chance
        chance *= mean / (number + 1)
    return min(1.0, max(0.0, 1 - idle / hosts))


@dataclass(frozen=True, slots=True)
class HostMoment:
    """State of a pool's hosts at one moment.

    busy: share of time inside a step. step_s: length of a decode step. token_s: time of a token,
    with the steps that others' prompts make longer. speed: of the card that a working host has.
    guest_step_s: length of the step of a guest that computes in the hosts' idle time, 0 without
    one. queue_s: wait of a request until any host has room for it.
    """

    busy: float
    step_s: float
    token_s: float
    speed: float = 1.0
    guest_step_s: float = 0.0
    queue_s: float = 0.0


class ServingFluid:
    """Fluid model of a pool's hosts under a stream of requests, advanced window by window; it
    counts latencies and lent time.
    """

    def __init__(
        self,
        pool: HostPool,
        requests: Iterator[UserRequest],
        slice_s: float,
        hold: MaxHostBusy | None = None,
    ) -> None:
        """Create the model.

        hold: a capacity policy's limit on how busy a host may be to lend; None is no limit.
        """
        self._pool = pool
        self._requests = requests
        self._next = next(requests, None)
        self._fluid = HostPoolFluid(pool.engine, pool.hosts, UserMix(1_000.0, 100.0))
        self._book = LatencyBook(pool.slo, slice_s)
        self._prompt = self._output = 0.0
        self._share = 1.0
        self._hold = hold
        # Hosts are alike here, so one stands for all of them.
        self._busy_hold = BusyHold()
        # Time at which each host has computed its prompts.
        self._free_s = [0.0] * pool.hosts
        self._turn = 0.5
        self.requests = 0
        self.now_s = self.busy_s = self.in_host_s = 0.0
        # Card time of a guest, and the time in which it was held.
        self.lent_s = self.held_s = 0.0

    @property
    def over(self) -> bool:
        """True if all users' requests have arrived."""
        return self._next is None

    def share_at(self, time_s: float, guests: GuestDuty) -> float:
        """Advance the model to a time, which never goes back; return the share of a card that a
        guest has then.
        """
        while self.now_s + WINDOW_S <= time_s:
            self._window(guests)
        return self._share

    def advance(self, time_s: float, guests: GuestDuty = NO_GUEST) -> None:
        """Advance the model to a time, with these guests."""
        self.share_at(time_s, guests)

    @property
    def mix(self) -> UserMix:
        """Mean lengths of the requests so far."""
        return self._fluid.mix

    def latencies(self) -> UserLatencies:
        """Return TTFT, TPOT and attainment of all users' requests so far."""
        return self._book.latencies()

    def _window(self, guests: GuestDuty) -> None:
        end_s = self.now_s + WINDOW_S
        arrived: list[UserRequest] = []
        while self._next is not None and self._next.arrival_s < end_s:
            arrived.append(self._next)
            self._next = next(self._requests, None)
        self._prompt += sum(each.prompt_tokens for each in arrived)
        self._output += sum(each.output_tokens for each in arrived)
        self.requests += len(arrived)
        fluid = self._fluid
        if self.requests:
            fluid.serve(UserMix(self._prompt / self.requests, self._output / self.requests))
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
        self._busy_hold.seen(_POOL, busy, end_s)
        queue_s = fluid.queued / (fluid.capacity_rps(speed) * self._pool.hosts)
        step_s, token_s = fluid.step_s(speed), fluid.token_s(speed)
        moment = HostMoment(busy, step_s, token_s, speed, guests.step_s * duty, queue_s)
        for request in arrived:
            self._serve(request, moment)
        self.now_s = end_s

    def _serve(self, request: UserRequest, now: HostMoment) -> None:
        """Give one request to the host that is free first, and record its latencies.

        Requests come in order of arrival.
        """
        engine = self._pool.engine
        self._turn = (self._turn + _GOLDEN) % 1.0
        begin_s = max(request.arrival_s + now.queue_s, self._free_s[0])
        # A request that comes during a step of the host waits for the rest of that step. Any other
        # waits for none, but a guest that is in a step has half of the card until that step ends.
        in_step = self._turn < now.busy
        chunks = -(-request.prompt_tokens // engine.max_step_tokens)
        prefill_s = chunks * (now.step_s if in_step else engine.profile.base_s / now.speed)
        prefill_s += request.prompt_tokens * engine.profile.per_token_s / now.speed
        if in_step:
            begin_s = max(begin_s, request.arrival_s + self._turn / now.busy * now.step_s)
        else:
            rest = (self._turn - now.busy) / max(1e-9, 1 - now.busy)
            prefill_s += min(prefill_s, rest * now.guest_step_s)
        heapq.heapreplace(self._free_s, begin_s + prefill_s)
        ttft_s = begin_s + prefill_s - request.arrival_s
        tpot_s = now.token_s if request.output_tokens > 1 else None
        self._book.served(request.arrival_s, ttft_s, tpot_s)

    def _held(self) -> bool:
        """Return True if production's hold of busy hosts forbids lending beside this one now."""
        if self._hold is None:
            return False
        self._busy_hold.judge({_POOL: self._hold}, self.now_s)
        return _POOL in self._busy_hold.status()

    def _beside_busy(self, guest_step_s: float) -> float:
        """Return 1 if a guest's step fits into the lent share of a busy host's slack, else 0."""
        guest = self._pool.guest
        if guest is None or guest.slack_share <= 0 or guest_step_s <= 0:
            return 0.0
        step_s = self._fluid.step_s(SHARED_SPEED)
        slo = self._pool.slo
        # The first of the prompts that wait has waited for about as long as the last one will.
        backlog_s = sum(max(0.0, free_s - self.now_s) for free_s in self._free_s)
        prefill_s = slo.ttft_s - backlog_s / len(self._free_s) - step_s
        slack_s = min(slo.tpot_s - step_s, prefill_s) - MARGIN_S
        return float(guest.slack_share * slack_s > guest_step_s)
