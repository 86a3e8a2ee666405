"""The question asked before every guest step: may it run, and how large?

Fail closed: whatever is missing, torn, old, foreign or unknown yields. An idle host writes nothing
new, so its last idle state is as good as its writer's lock and heartbeat: they are looked at before
every step (`executor.control_page.host_seat`).
"""

from dataclasses import dataclass
from typing import Final

from executor.control_page.host_seat import CLOCK_TOLERANCE_NS, HostView
from executor.control_page.records import Grant, GrantMode, HostState
from slo import StepModel, dual_slack

OK: Final = "ok"
HOST_BUSY: Final = "host_busy"
NO_SLACK: Final = "no_slack"
GRANT_EXPIRED: Final = "grant_expired"
HEARTBEAT_STALE: Final = "heartbeat_stale"
PAGE_UNREADABLE: Final = "page_unreadable"
FROZEN: Final = "frozen"
DRAINING: Final = "draining"
KILLED: Final = "killed"
THROTTLED: Final = "throttled"


@dataclass(frozen=True, slots=True)
class Run:
    """Run one step of at most `token_budget` tokens and `max_sequences` sequences."""

    token_budget: int
    max_sequences: int
    reason: str = OK


@dataclass(frozen=True, slots=True)
class Yield:
    """Run nothing; `reason` is a word of this module or of `executor.control_page.host_seat`."""

    reason: str


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How old is stale, and how careful to be with slack.

    `max_grant_ns` bounds how far ahead an expiry may lie: one further away comes from another boot
    or a broken clock. `host_prefill_ns_per_token` is the profiled cost of the host's queue.
    """

    grant_stale_ns: int = 250_000_000
    host_stale_ns: int = 250_000_000
    max_grant_ns: int = 5_000_000_000
    safety_margin_ns: int = 2_000_000
    host_prefill_ns_per_token: int = 0


def decide(
    sight: HostView,
    grant: Grant | None,
    model: StepModel,
    now_ns: int,
    limits: GateLimits,
    context_tokens: int = 0,
) -> Run | Yield:
    """Run or yield, from what the page says at `now_ns`; a grant of None cannot be read.

    `model` predicts the guest's own steps over `context_tokens` of KV. With `slack_share` 0 the
    guest runs only while the host is idle; above 0 it gets the largest budget whose predicted step
    fits share × the tighter slack.
    """
    if grant is None:
        return Yield(PAGE_UNREADABLE)
    refusal = _refusal(grant, now_ns, limits) or sight.doubt(now_ns)
    host = sight.state
    if refusal is not None or host is None:
        return Yield(refusal or PAGE_UNREADABLE)
    reason = THROTTLED if grant.mode is GrantMode.THROTTLE else OK
    if host.idle:
        return Run(grant.token_budget, grant.max_sequences, reason)
    if not grant.slack_share > 0:
        return Yield(HOST_BUSY)
    if _stale(host.heartbeat_ns, now_ns, limits.host_stale_ns):
        return Yield(HEARTBEAT_STALE)
    available_ns = _lendable_ns(host, min(grant.slack_share, 1.0), now_ns, limits)
    budget = model.largest_budget(
        available_ns / 1e9, grant.token_budget, grant.max_sequences, context_tokens
    )
    return Run(budget, grant.max_sequences, reason) if budget > 0 else Yield(NO_SLACK)


_STOPPING = {
    GrantMode.KILL: KILLED,
    GrantMode.FREEZE: FROZEN,
    GrantMode.DRAIN: DRAINING,
}


def lapsed(grant: Grant, now_ns: int, limits: GateLimits) -> str | None:
    """Why a grant no longer counts, whatever its mode; None while it is live."""
    if not now_ns < grant.expiry_ns <= now_ns + limits.max_grant_ns:
        return GRANT_EXPIRED
    if _stale(grant.heartbeat_ns, now_ns, limits.grant_stale_ns):
        return HEARTBEAT_STALE
    return None


def _refusal(grant: Grant, now_ns: int, limits: GateLimits) -> str | None:
    if grant.mode is GrantMode.KILL:
        return KILLED
    reason = lapsed(grant, now_ns, limits)
    if reason is not None:
        return reason
    if grant.mode in _STOPPING:
        return _STOPPING[grant.mode]
    if grant.token_budget <= 0 or grant.max_sequences <= 0:
        return THROTTLED
    return None


def _stale(heartbeat_ns: int, now_ns: int, limit_ns: int) -> bool:
    # A heartbeat from the future proves nothing about the present.
    return not -CLOCK_TOLERANCE_NS <= now_ns - heartbeat_ns <= limit_ns


def _lendable_ns(host: HostState, share: float, now_ns: int, limits: GateLimits) -> float:
    # The host's last step is the reactive floor of what its next one will take.
    prefill_ns = host.queued_prefill_tokens * limits.host_prefill_ns_per_token
    slack_ns = dual_slack(
        prefill_deadline_ns=host.earliest_prefill_deadline_ns,
        decode_deadline_ns=host.earliest_decode_deadline_ns,
        now_ns=now_ns,
        predicted_prefill_ns=max(host.last_step_ns, prefill_ns),
        predicted_decode_ns=host.last_step_ns,
    ).tightest_ns
    # Work without any deadline: the host has no targets, so its slack is unknown, not endless.
    return 0.0 if slack_ns is None else share * (slack_ns - limits.safety_margin_ns)
