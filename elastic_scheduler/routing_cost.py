"""What a turn would cost on a replica.

    cost_s = (tokens owed to running turns + this turn's expected tokens) / live decode rate
           + silence: seconds since a replica with turns sent its last token
           + uncached prompt tokens / prefill rate
           + P(revoked before the end) * seconds to prefill the turn's tokens again elsewhere

Journaled tokens survive a revocation, so what is computed again is their prefill, on average of
the prompt and half the output. A turn that is likely to be long costs `LONG_ON_GUEST` times as much
on a guest: it would be there when the host's next burst comes, and dedicated places are for such.
"""

from dataclasses import dataclass

from elastic_scheduler.offer import ReplicaKind
from elastic_scheduler.replica_load import ReplicaLoad
from elastic_scheduler.turn_need import TurnNeed

LONG_ON_GUEST = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica weighed for a turn; `refusal` is empty when it may take the turn now."""

    replica: str
    cost_s: float
    owed_tokens: int
    decode_tok_s: float
    uncached_tokens: int
    refusal: str
    revoke_s: float = 0.0  # the part of the cost that is the chance of a revocation


@dataclass(slots=True)
class TurnAsk:
    """A turn, with what is known about it: likely length, and who holds its prefix."""

    need: TurnNeed
    expected_tokens: int
    is_long: bool
    holder: ReplicaLoad | None
    cached_tokens: int


def cost_s(load: ReplicaLoad, ask: TurnAsk, now_s: float) -> float:
    """Seconds until the turn is done, if it goes to this replica now."""
    uncached = ask.need.prompt_tokens
    if load is ask.holder:
        uncached = max(0, uncached - ask.cached_tokens)
    total_s = load.wait_s(ask.expected_tokens, now_s) + uncached / load.prefill_tok_s
    if load.view.kind is ReplicaKind.DEDICATED:
        return total_s
    total_s += revoke_s(load, ask, total_s, now_s)
    return total_s * LONG_ON_GUEST if ask.is_long else total_s


def revoke_s(load: ReplicaLoad, ask: TurnAsk, duration_s: float, now_s: float) -> float:
    """Seconds that a revocation is expected to cost a turn of `duration_s`."""
    again_s = (ask.need.prompt_tokens + ask.expected_tokens / 2) / load.prefill_tok_s
    return load.revoke_chance(duration_s, now_s) * again_s


def refusal(load: ReplicaLoad, need: TurnNeed, now_s: float) -> str:
    """Why the replica may not take the turn now; empty when it may."""
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


def weigh(load: ReplicaLoad, ask: TurnAsk, now_s: float) -> Candidate:
    """One replica with its cost for a turn, or why it is out."""
    uncached = ask.need.prompt_tokens
    if load is ask.holder:
        uncached = max(0, uncached - ask.cached_tokens)
    total_s = cost_s(load, ask, now_s)
    return Candidate(
        load.view.id,
        total_s,
        load.owed,
        load.decode_tok_s,
        uncached,
        refusal(load, ask.need, now_s),
        revoke_s(load, ask, load.wait_s(ask.expected_tokens, now_s), now_s),
    )
