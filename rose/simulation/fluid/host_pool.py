"""Fluid of a pool of hosts: how busy users keep them, and how much of their cards a guest gets.

The state is the mean number of requests in a host, n. They come at rate λ and stay T(n) seconds:

    dn/dt = λ − n ÷ T(n)        busy share of hosts = E[min(M, hosts)] ÷ hosts

M, the number in all of them, is Poisson of mean n × hosts, since requests are served side by side
(an M/G/∞ queue); a balancer gives each to a host that has the fewest, so none is idle while another
has two.
T(n) = (prefill + output tokens × step(n)) ÷ (1 − λ × prefill): all sequences of a step wait for the
prompts that others bring into it.
"""

import math
from dataclasses import dataclass

from rose.simulation.cluster import ClusterError, EngineSpec
from slo import StepProfile

# A host is never asked to take more than this of its time for prompts.
_MOST_PREFILL_SHARE = 0.95
_ROUNDS = 12
_CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class StepLine:
    """Time of a step as a line over its decoding sequences: `base_s` + n × `per_sequence_s`.

    prefill_s_per_token: of a prompt's token, in whatever step it comes.
    """

    base_s: float
    per_sequence_s: float
    prefill_s_per_token: float

    @classmethod
    def of(
        cls, profile: StepProfile, context_tokens: float, prefill_per_output: float
    ) -> "StepLine":
        """Return the line for a mean context; each output token brings `prefill_per_output`."""
        per_token_s = profile.per_token_s
        return cls(
            profile.base_s,
            per_token_s * (1 + prefill_per_output)
            + profile.per_sequence_s
            + profile.per_context_token_s * context_tokens,
            per_token_s,
        )

    def seconds(self, sequences: float) -> float:
        """Return the seconds of a step with this many; fractions are means."""
        return self.base_s + self.per_sequence_s * sequences


@dataclass(frozen=True, slots=True)
class UserMix:
    """Mean lengths of users' requests."""

    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        for key in ("prompt_tokens", "output_tokens"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ClusterError(key, f"{value}; give a figure above 0")


@dataclass(frozen=True, slots=True)
class GuestLoad:
    """Guests at one moment: `duty` of the time they have something to do, in steps of `step_s`."""

    duty: float
    step_s: float


class HostPoolFluid:
    """Hosts of a pool under users' traffic, advanced by the caller's clock.

    `speed`: of the card that the hosts have while they work, below 1 where a guest computes beside
    them. Requests that no host has room for wait in `queued`.
    """

    def __init__(
        self, engine: EngineSpec, profile: StepProfile, hosts: float, mix: UserMix
    ) -> None:
        self._engine = engine
        self._hosts = hosts
        self._profile = profile
        self.in_host = 0.0
        self.queued = 0.0
        # Share of a host's time, in the last stretch, that went to prompts.
        self.prefill_share = 0.0
        self.serve(mix)

    def serve(self, mix: UserMix) -> None:
        """Requests have these lengths from now on."""
        self._mix = mix
        context = mix.prompt_tokens + mix.output_tokens / 2
        self._line = StepLine.of(self._profile, context, 0.0)
        self._most = min(self._engine.max_sequences, max(1.0, self._engine.kv_tokens / context))

    @property
    def mix(self) -> UserMix:
        """Lengths of its requests."""
        return self._mix

    @property
    def busy(self) -> float:
        """Share of a host's time inside a step."""
        return busy_share(self.in_host, self._hosts)

    @property
    def prefill_s(self) -> float:
        """Seconds of a mean prompt, alone."""
        return self._mix.prompt_tokens * self._line.prefill_s_per_token

    def step_s(self, speed: float = 1.0) -> float:
        """Return the seconds of a decode step of a busy host."""
        return self._line.seconds(self._in_busy_host()) / speed

    def token_s(self, speed: float = 1.0) -> float:
        """Return the seconds of a request's token, with full steps of others' prompts at most."""
        step_s = self.step_s(speed)
        most_s = self._engine.max_step_tokens * self._line.prefill_s_per_token / speed
        return min(step_s / (1 - self.prefill_share), step_s + most_s)

    def stay_s(self, rate_per_s: float, in_host: float, speed: float = 1.0) -> float:
        """Return how long a request stays, while hosts have `in_host` of them on the average."""
        beside = in_host / max(1e-12, busy_share(in_host, self._hosts)) if in_host else 1.0
        step_s = self._line.seconds(max(1.0, beside)) / speed
        prefill_s = self.prefill_s / speed
        share = min(_MOST_PREFILL_SHARE, rate_per_s * prefill_s)
        return (prefill_s + self._mix.output_tokens * step_s) / (1 - share)

    def capacity_rps(self, speed: float = 1.0) -> float:
        """Most requests a second that a host can serve, its batch as large as it gets."""
        step_s = self._line.seconds(self._most) / speed
        return 1.0 / (self._mix.output_tokens * step_s / self._most + self.prefill_s / speed)

    def advance(self, rate_per_s: float, seconds: float, speed: float = 1.0) -> float:
        """Let `rate_per_s` requests of all hosts come for so long; busy share of that time.

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
        """Requests in a host in the long run, at so many a second for each."""
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

    def _in_busy_host(self) -> float:
        busy = self.busy
        return self.in_host / busy if busy > 1e-9 else 1.0


# The Poisson distribution of more hosts is close to a normal one.
_MANY_HOSTS = 40


def busy_share(in_host: float, hosts: float) -> float:
    """Share of hosts that have at least one of `in_host` × `hosts` requests, spread evenly."""
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
