"""Cost model of the router: the seconds that a turn would take on each replica.

    cost_s = tokens owed to running turns / live decode rate
           + this turn's expected tokens / pace of single turns there, live decode rate if unknown
           + silence: seconds since a replica with turns sent its last token
           + uncached prompt tokens / prefill rate
           + P(revoked before the end) * seconds to prefill the turn's tokens again elsewhere

Journaled tokens survive a revocation, so only their prefill is computed again: on average that of
the prompt and half the output. A turn that is likely to be long costs `LONG_ON_GUEST` times as much
on a guest: it would still run when the host's next burst comes, and belongs on a dedicated replica.

`TurnSpeeds` measures single turns, for the rest of a running turn and for a copy of it elsewhere.
A replica's rate says little about one turn, which never has all of it: an idle replica that offers
a thousand tokens per second to a full batch gives a single turn thirty. A turn's own speed is used
where it is known, else that of turns on the same replica, else that of all turns.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from elastic_scheduler.leases.lease_table import ReplicaKind
from elastic_scheduler.routing.predictors import RateMeter, WorkingSet

# Rate of nodes without known rates: any figure will do if all such replicas get the same.
UNKNOWN_DECODE_TOK_S = 1_000.0
UNKNOWN_PREFILL_TOK_S = 10_000.0
# A stalled replica's rate goes to zero; its cost must stay finite to be compared.
MIN_RATE_TOK_S = 0.1
# Revocations are rare next to turns: an estimate starts from one in ten minutes, and a replica's
# own history outweighs that after ten minutes of turns.
PRIOR_REVOKES = 1.0
PRIOR_REVOKE_S = 600.0
LONG_ON_GUEST = 1.25
ENOUGH_FOR_PACE = 8
# Weight of the newest turn in a replica's pace, and in that of all replicas.
REPLICA_SHARE = 0.3
FLEET_SHARE = 1 / 256


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Row of the router's table: a replica, its limits and rates; usable: leased and healthy."""

    id: str
    kind: ReplicaKind
    usable: bool
    policy_version: int
    max_sequences: int
    kv_tokens: int = 0
    decode_tok_s: float = 0.0
    prefill_tok_s: float = 0.0


class ReplicaLoad:
    """Load of one replica: live turns, tokens owed to them, and measured rates.

    Times are monotonic seconds passed in.
    """

    __slots__ = (
        "bucket",
        "busy_s",
        "busy_since_s",
        "decode_tok_s",
        "heard_s",
        "live",
        "meter",
        "owed",
        "pace_tok_s",
        "placed_owed",
        "prefill_tok_s",
        "resting_until_s",
        "revokes",
        "slot",
        "view",
        "working_set",
    )

    def __init__(self, view: ReplicaView, now_s: float) -> None:
        self.meter = RateMeter(view.decode_tok_s or UNKNOWN_DECODE_TOK_S, now_s)
        self.working_set = WorkingSet()
        self.view = view
        self.prefill_tok_s = view.prefill_tok_s or UNKNOWN_PREFILL_TOK_S
        self.decode_tok_s = view.decode_tok_s or UNKNOWN_DECODE_TOK_S
        self.live = 0
        self.owed = 0
        self.heard_s = 0.0
        # Rate of one turn among others; 0 until one ended here.
        self.pace_tok_s = 0.0
        self.resting_until_s = 0.0
        self.busy_s = 0.0
        self.busy_since_s = 0.0
        self.revokes = 0
        # Bucket of this replica in the index, or None.
        self.bucket: list[ReplicaLoad] | None = None
        self.slot = 0
        self.placed_owed = 0

    def set_view(self, view: ReplicaView) -> None:
        """Replace the replica's row of the table; measurements stay."""
        if view.policy_version != self.view.policy_version:
            self.working_set.clear()
        self.view = view
        self.prefill_tok_s = view.prefill_tok_s or UNKNOWN_PREFILL_TOK_S
        self.meter.set_offered(view.decode_tok_s or UNKNOWN_DECODE_TOK_S)

    @property
    def is_open(self) -> bool:
        """True if the replica has fewer turns than its cap."""
        return self.live < self.view.max_sequences

    def add_turn(self, tokens: int, now_s: float) -> None:
        """Add a turn that is expected to generate `tokens`."""
        if self.live == 0:
            self.meter.set_busy(True, now_s)
            self.heard_s = now_s
            self.busy_since_s = now_s
        self.live += 1
        self.owed += tokens

    def drop_turn(self, owed_tokens: int, now_s: float, revoked: bool) -> None:
        """Remove a turn that still owed `owed_tokens`; revoked: its replica's lease ended."""
        self.live -= 1
        self.owed -= owed_tokens
        self.revokes += revoked
        if self.live == 0:
            self.meter.set_busy(False, now_s)
            self.busy_s += now_s - self.busy_since_s

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Return the seconds until `tokens` more are decoded after those owed, plus the silence.

        A pause that has lasted t is expected to last as long again, so silence counts in full.
        Updates the measured rate.
        """
        rate_tok_s = self.decode_tok_s = self.meter.tok_s(now_s)
        if rate_tok_s < MIN_RATE_TOK_S:
            rate_tok_s = MIN_RATE_TOK_S
        # A turn decodes one sequence: it never has all of the rate, however idle the replica is.
        pace_tok_s = self.pace_tok_s
        own_tok_s = pace_tok_s if 0.0 < pace_tok_s < rate_tok_s else rate_tok_s
        cost_s = self.owed / rate_tok_s + tokens / own_tok_s
        return cost_s + now_s - self.heard_s if self.live else cost_s

    def revoke_chance(self, duration_s: float, now_s: float) -> float:
        """Return the probability that the replica's lease is revoked within `duration_s`.

        It is estimated from the replica's own revocations; 0 for a dedicated replica.
        """
        if self.view.kind is ReplicaKind.DEDICATED:
            return 0.0
        busy_s = self.busy_s + (now_s - self.busy_since_s if self.live else 0.0)
        per_s = (self.revokes + PRIOR_REVOKES) / (busy_s + PRIOR_REVOKE_S)
        return -math.expm1(-duration_s * per_s)


@dataclass(frozen=True, slots=True)
class TurnNeed:
    """Requirements of a turn: lengths in tokens, versions that it accepts, and its names.

    session: its trajectory, group: its prompt, both "" if unknown. made_tokens: tokens of a
    continued turn that are in the prompt already. request_id: name under which the choice can be
    looked up. prefix_keys: keys of the prompt's beginning, for a turn without a trajectory.
    """

    session: str
    prompt_tokens: int
    budget_tokens: int
    min_version: int | None = None
    exact_version: int | None = None
    request_id: str = ""
    job: str = ""
    group: str = ""
    made_tokens: int = 0
    prefix_keys: tuple[int, ...] = ()

    def accepts(self, version: int) -> bool:
        """Return True if the turn may have tokens of policy `version`."""
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """Replica weighed for a turn, with its cost; refusal: "" if it may take the turn now."""

    replica: str
    cost_s: float
    owed_tokens: int
    decode_tok_s: float
    uncached_tokens: int
    refusal: str
    revoke_s: float = 0.0  # the part of the cost that is the chance of a revocation


@dataclass(slots=True)
class CostQuery:
    """Turn to place, with its expected length and the replica that caches its prefix."""

    need: TurnNeed
    expected_tokens: int
    is_long: bool
    holder: ReplicaLoad | None
    cached_tokens: int


def cost_s(load: ReplicaLoad, ask: CostQuery, now_s: float) -> float:
    """Return the seconds until the turn would be done if it went to this replica now.

    A long turn on a guest counts as 1.25 times as long.
    """
    uncached = ask.need.prompt_tokens
    if load is ask.holder:
        uncached = max(0, uncached - ask.cached_tokens)
    total_s = load.wait_s(ask.expected_tokens, now_s) + uncached / load.prefill_tok_s
    if load.view.kind is ReplicaKind.DEDICATED:
        return total_s
    total_s += revoke_s(load, ask, total_s, now_s)
    return total_s * LONG_ON_GUEST if ask.is_long else total_s


def revoke_s(load: ReplicaLoad, ask: CostQuery, duration_s: float, now_s: float) -> float:
    """Return the seconds that a revocation is expected to cost a turn of `duration_s`."""
    again_s = (ask.need.prompt_tokens + ask.expected_tokens / 2) / load.prefill_tok_s
    return load.revoke_chance(duration_s, now_s) * again_s


def refusal(load: ReplicaLoad, need: TurnNeed, now_s: float) -> str:
    """Return the reason why the replica may not take the turn now, "" if it may."""
    view = load.view
    if not view.usable:
        return "not leased or not healthy"
    if not need.accepts(view.policy_version):
        return f"runs version {view.policy_version}"
    if view.kv_tokens and need.prompt_tokens + need.budget_tokens > view.kv_tokens:
        return f"holds only {view.kv_tokens} tokens"
    if now_s < load.resting_until_s:
        return "failed a moment ago"
    if not load.is_open:
        return "full"
    return ""


def weigh(load: ReplicaLoad, ask: CostQuery, now_s: float) -> ReplicaCandidate:
    """Return the replica as a candidate: its cost for the turn, and a refusal if it has one."""
    uncached = ask.need.prompt_tokens
    if load is ask.holder:
        uncached = max(0, uncached - ask.cached_tokens)
    total_s = cost_s(load, ask, now_s)
    return ReplicaCandidate(
        load.view.id,
        total_s,
        load.owed,
        load.decode_tok_s,
        uncached,
        refusal(load, ask.need, now_s),
        revoke_s(load, ask, load.wait_s(ask.expected_tokens, now_s), now_s),
    )


# Seconds that the turn would take there, and the replica.
Weighed = tuple[float, ReplicaLoad]


@dataclass(slots=True)
class TurnPlacement:
    """Live turn on a replica; the caller passes it to `progress` and `end` of the router."""

    replica: str
    need: TurnNeed
    owed_tokens: int
    load: ReplicaLoad
    context_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def pace_tok_s(self) -> float:
        """Tokens per second of the turn since its first ones; 0 while fewer than 8 followed."""
        tokens, elapsed_s = self.generated_tokens - self.first_tokens, self.last_s - self.first_s
        return tokens / elapsed_s if tokens >= ENOUGH_FOR_PACE and elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Quote:
    """Replica for a copy of a turn, and the seconds that the copy would take there."""

    replica: str
    cost_s: float
    ask: CostQuery
    load: ReplicaLoad
    weighed: list[Weighed]

    @property
    def places(self) -> int:
        """Number of turns that the replica could take now."""
        return self.load.view.max_sequences - self.load.live


class TurnSpeeds:
    """Measured tokens per second of single turns, by replica and over all replicas."""

    def __init__(self) -> None:
        self._fleet_tok_s = 0.0

    def note(self, placement: TurnPlacement) -> None:
        """Record the speed of a turn's attempt that ended, if it had enough tokens."""
        seen, load = placement.pace_tok_s, placement.load
        if seen:
            load.pace_tok_s = _moved(load.pace_tok_s, seen, REPLICA_SHARE)
            self._fleet_tok_s = _moved(self._fleet_tok_s, seen, FLEET_SHARE)

    def left_s(self, placement: TurnPlacement, tokens: int, silent_s: float) -> float:
        """Return the seconds that a live turn takes for `tokens` more; 0 if no speed is known."""
        pace_tok_s = placement.pace_tok_s or self._of(placement.load)
        return tokens / pace_tok_s + silent_s if pace_tok_s else 0.0

    def quote(self, loads: Iterable[ReplicaLoad], ask: CostQuery, now_s: float) -> Quote | None:
        """Return the replica on which the turn would end first if begun now, or None."""
        weighed = [(self._begun_s(load, ask, now_s), load) for load in loads]
        weighed = [(each_s, load) for each_s, load in weighed if each_s]
        if not weighed:
            return None
        best_s, best = min(weighed, key=itemgetter(0))
        return Quote(best.view.id, best_s, ask, best, weighed)

    def _begun_s(self, load: ReplicaLoad, ask: CostQuery, now_s: float) -> float:
        """Return the seconds that the turn would take if begun there now; 0 if unknown."""
        pace_tok_s = self._of(load)
        if not pace_tok_s:
            return 0.0
        uncached = max(0, ask.need.prompt_tokens - ask.cached_tokens * (load is ask.holder))
        total_s = ask.expected_tokens / pace_tok_s + uncached / load.prefill_tok_s
        return total_s + revoke_s(load, ask, total_s, now_s)

    def _of(self, load: ReplicaLoad) -> float:
        return load.pace_tok_s or self._fleet_tok_s


def _moved(old: float, seen: float, share: float) -> float:
    return old + share * (seen - old) if old else seen
