"""Cost model of leases: a job's limit of guests, and the gain of one more replica.

`AimdLimit` bounds a job's guests: plus one while nothing happens, half when hosts revoke some.
Hosts share their load: where one revokes its guest, others are about to. As in TCP (Chiu and Jain
1989), additive increase and multiplicative decrease let all jobs find the level that hosts can
carry, without being told it. The limit ends no lease; it only stops growth.

`saved_s` compares the gain from another replica with the cost of starting it. A job with W tokens
to make at rate R needs W / R seconds; with a replica of rate r, W / (R + r). Each turn decodes one
sequence, so fewer turns than places leave a part of the rate unused, though less than that share: a
step reads all weights whatever its batch, so turns are faster where fewer share it.

    rate(replicas) = sum of decode rates * x * (1 + s) / (1 + s * x),  x = min(1, turns / places)

s is `SATURATION`: alone a turn is 1 + s times as fast as in a full batch. A replica more than there
are turns helps none of them.

The gain counts only while the replica is likely to stay: up to the mean time between its
revocations. The cost is the measured time from the lease to the first token: weights and warm-up.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_scheduler.leases.lease_table import Offer, ReplicaKind, SwitchKind
from elastic_scheduler.policies.types import JobDemand
from elastic_scheduler.routing.cost import UNKNOWN_DECODE_TOK_S

# By published step times of 8B to 70B models on H100 and H200 a sequence alone is 1.9 to 4 times as
# fast as one of 128 with contexts of 3,000 tokens; this is the least of these.
SATURATION = 1.0
GROW_S = 5.0
# Revocations this close together are one event.
EVENT_S = 5.0


class AimdLimit:
    """Unlimited until the first revocation. Times are monotonic seconds, handed in."""

    def __init__(self, grow_s: float = GROW_S, event_s: float = EVENT_S) -> None:
        self._grow_s = grow_s
        self._event_s = event_s
        self._limit = math.inf
        self._changed_s = -math.inf
        self._halved_s = -math.inf

    def limit(self, now_s: float) -> float:
        """Return the guests that may be held at `now_s`, at least 1."""
        if math.isinf(self._limit):
            return self._limit
        steps = math.floor((now_s - self._changed_s) / self._grow_s)
        if steps > 0:
            self._limit += steps
            self._changed_s += steps * self._grow_s
        return self._limit

    def revoked(self, held: int, now_s: float) -> None:
        """Record that a host took a guest back; `held` is the job's number before."""
        if now_s < self._halved_s + self._event_s:
            return
        self._limit = max(1.0, min(self.limit(now_s), float(held)) / 2)
        self._changed_s = self._halved_s = now_s


# Default before the first measurement: a few seconds, so that a first lease is tried. Another job's
# weights are fetched and proven, another model's engine is started.
FIRST_SWITCH_S = 5.0
FIRST_SWITCHES_S = {SwitchKind.NONE: FIRST_SWITCH_S, SwitchKind.JOB: 15.0, SwitchKind.MODEL: 60.0}
NEWEST_SHARE = 0.3
KEPT = 65_536


class SwitchCosts:
    """Measured seconds from a lease to its first token, by replica, else by kind of replica.

    Each kind of switch has figures of its own: a replica that keeps its job's weights is ready
    long before one that takes another job's, or another model.
    """

    def __init__(self, first_s: Mapping[SwitchKind, float] = FIRST_SWITCHES_S) -> None:
        self._first_s = first_s
        self._measured_s: dict[tuple[str, SwitchKind], float] = {}
        self._kinds_s: dict[tuple[ReplicaKind, SwitchKind], float] = {}

    def observe(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Record a measured switch. An invalid duration is left out."""
        if not 0 <= took_s < math.inf:
            return
        key, kind = (offer.replica, switch), (offer.kind, switch)
        known_s = self._measured_s.get(key, took_s)
        self._measured_s[key] = known_s + NEWEST_SHARE * (took_s - known_s)
        kind_s = self._kinds_s.get(kind, took_s)
        self._kinds_s[kind] = kind_s + NEWEST_SHARE * (took_s - kind_s)
        if len(self._measured_s) > KEPT:
            del self._measured_s[next(iter(self._measured_s))]

    def expected_s(self, offer: Offer, switch: SwitchKind = SwitchKind.NONE) -> float:
        """Return the seconds that such a switch of the replica will take."""
        measured_s = self._measured_s.get(
            (offer.replica, switch), self._kinds_s.get((offer.kind, switch))
        )
        if measured_s is not None:
            return measured_s
        if switch is SwitchKind.NONE:
            return self._first_s[switch]
        # A switch takes no less than a lease that changes nothing.
        return max(self._first_s[switch], self.expected_s(offer))


@dataclass(frozen=True, slots=True)
class Supply:
    """Sum of replicas: a job's own, so that one more or less is weighed without all others."""

    count: int = 0
    decode_tok_s: float = 0.0
    places: float = 0.0

    def plus(self, offer: Offer) -> "Supply":
        """Return the sum with one more replica."""
        return Supply(
            self.count + 1,
            self.decode_tok_s + (offer.decode_tok_s or UNKNOWN_DECODE_TOK_S),
            self.places + offer.max_sequences,
        )

    def minus(self, offer: Offer) -> "Supply":
        """Return the sum without one of its replicas; exactly nothing without the last one."""
        if self.count <= 1:
            return Supply()
        return Supply(
            self.count - 1,
            self.decode_tok_s - (offer.decode_tok_s or UNKNOWN_DECODE_TOK_S),
            self.places - offer.max_sequences,
        )

    def rate_tok_s(self, turns: float) -> float:
        """Return the tokens per second that `turns` turns get out of them."""
        if self.places <= 0:
            return 0.0
        share = min(1.0, turns / self.places)
        return self.decode_tok_s * share * (1 + SATURATION) / (1 + SATURATION * share)


def supply_of(offers: Iterable[Offer]) -> Supply:
    """Return the sum of replicas."""
    supply = Supply()
    for offer in offers:
        supply = supply.plus(offer)
    return supply


def saved_s(demand: JobDemand, have: Supply, offer: Offer, tenure_s: float = math.inf) -> float:
    """Return how much sooner the job would be done with `offer` beside its own, in seconds.

    Infinite for a job without replicas, or with unknown demand; 0 for one without work, or with no
    more turns than replicas.
    """
    if demand.turns <= have.count or demand.owed_tokens <= 0:
        return 0.0
    if math.isinf(demand.owed_tokens):
        return math.inf
    before = have.rate_tok_s(demand.turns)
    after = have.plus(offer).rate_tok_s(demand.turns)
    if after <= before:
        return 0.0
    if before <= 0:
        return math.inf
    left_s = min(demand.owed_tokens / before, tenure_s)
    return left_s * (1 - before / after)
