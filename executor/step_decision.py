"""Decision before every guest step: may it run, and how large?

Fail closed: anything missing, torn, old, foreign or unknown yields. An idle host writes nothing
new, so its last idle state is as good as its writer's lock and heartbeat: they are checked before
every step (`executor.control_page.host_seat`).
"""

from dataclasses import dataclass

from executor.control_page.page import CLOCK_TOLERANCE_NS, HostView
from executor.control_page.seqlock_records import NO_DEADLINE, Grant, GrantMode, HostState
from executor.freeze_reason import FreezeReason
from slo import StepModel

# An attribute of an enumeration costs a dictionary lookup each time.
_OK, _THROTTLED = FreezeReason.OK, FreezeReason.THROTTLED
_HOST_BUSY, _NO_SLACK = FreezeReason.HOST_BUSY, FreezeReason.NO_SLACK


@dataclass(frozen=True, slots=True)
class Run:
    """Verdict of the gate: run one step of at most `token_budget` tokens.

    The step may have `max_sequences` sequences.
    """

    token_budget: int
    max_sequences: int
    reason: FreezeReason = FreezeReason.OK


@dataclass(frozen=True, slots=True)
class Yield:
    """Verdict of the gate: run no step now, for `reason`."""

    reason: FreezeReason


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Limits of the gate: the most that heartbeats may be old, and safety margins of slack.

    `max_grant_ns` bounds how far ahead an expiry may lie: one further away comes from another boot
    or a broken clock. `host_prefill_ns_per_token` is the profiled cost of a token in the host's
    queue.
    """

    grant_stale_ns: int = 250_000_000
    host_stale_ns: int = 250_000_000
    max_grant_ns: int = 5_000_000_000
    safety_margin_ns: int = 2_000_000
    host_prefill_ns_per_token: int = 0


def decide(
    view: HostView,
    grant: Grant | None,
    model: StepModel,
    now_ns: int,
    limits: GateLimits,
    context_tokens: int = 0,
) -> Run | Yield:
    """Return the gate's verdict at `now_ns`: Run with the step's size, or Yield with the reason.

    grant: None if it cannot be read. `model` predicts the guest's own steps over `context_tokens`
    of KV. With `slack_share` 0 the guest runs only while the host is idle; above 0 it gets the
    largest budget whose predicted step fits share × the tighter slack.
    """
    if grant is None:
        return Yield(FreezeReason.PAGE_UNREADABLE)
    refusal = _refusal(grant, now_ns, limits) or view.doubt(now_ns)
    host = view.state
    if refusal is not None or host is None:
        return Yield(refusal or FreezeReason.PAGE_UNREADABLE)
    reason = _THROTTLED if grant.mode is GrantMode.THROTTLE else _OK
    if host.idle:
        return Run(grant.token_budget, grant.max_sequences, reason)
    if not grant.slack_share > 0:
        return Yield(_HOST_BUSY)
    if _stale(host.heartbeat_ns, now_ns, limits.host_stale_ns):
        return Yield(FreezeReason.HEARTBEAT_STALE)
    available_ns = _lendable_ns(host, min(grant.slack_share, 1.0), now_ns, limits)
    budget = model.largest_budget(
        available_ns / 1e9, grant.token_budget, grant.max_sequences, context_tokens
    )
    return Run(budget, grant.max_sequences, reason) if budget > 0 else Yield(_NO_SLACK)


def may_use_idle_host(
    view: HostView, grant: Grant | None, now_ns: int, limits: GateLimits, *, unleased: bool = False
) -> bool:
    """Return True if the host is idle and a live grant lets the guest compute.

    The caller's work has an unknown length, which no slack can hold: an engine's start, new
    weights. unleased: also accept a grant that freezes the guest only because no job has leased it.
    """
    if grant is None or view.doubt(now_ns) or view.state is None:
        return False
    idle_guest = grant.mode is GrantMode.FREEZE and grant.reason == FreezeReason.NO_LEASE
    refused = lapsed if unleased and idle_guest else _refusal
    return view.state.idle and refused(grant, now_ns, limits) is None


_STOPPING = {
    GrantMode.KILL: FreezeReason.KILLED,
    GrantMode.FREEZE: FreezeReason.FROZEN,
    GrantMode.DRAIN: FreezeReason.DRAINING,
}


def lapsed(grant: Grant, now_ns: int, limits: GateLimits) -> FreezeReason | None:
    """Return the reason why a grant no longer counts, whatever its mode; None while it is live."""
    if not now_ns < grant.expiry_ns <= now_ns + limits.max_grant_ns:
        return FreezeReason.GRANT_EXPIRED
    if _stale(grant.heartbeat_ns, now_ns, limits.grant_stale_ns):
        return FreezeReason.HEARTBEAT_STALE
    return None


def _refusal(grant: Grant, now_ns: int, limits: GateLimits) -> FreezeReason | None:
    if grant.mode is GrantMode.KILL:
        return FreezeReason.KILLED
    reason = lapsed(grant, now_ns, limits)
    if reason is not None:
        return reason
    if grant.mode in _STOPPING:
        return _STOPPING[grant.mode]
    if grant.token_budget <= 0 or grant.max_sequences <= 0:
        return FreezeReason.THROTTLED
    return None


def _stale(heartbeat_ns: int, now_ns: int, limit_ns: int) -> bool:
    # A heartbeat from the future proves nothing about the present.
    return not -CLOCK_TOLERANCE_NS <= now_ns - heartbeat_ns <= limit_ns


def _lendable_ns(host: HostState, share: float, now_ns: int, limits: GateLimits) -> float:
    """Return the nanoseconds that a guest's step may take: `share` of the tighter slack.

    prefill slack = arrival + TTFT target − now − predicted prefill
    decode slack  = last token + TPOT target − now − predicted decode

    (ROSE paper, 2026.) The deadlines on the page are the first two terms of each. 0 without a
    deadline.
    """
    # The host's last step is the reactive floor of its next one's time.
    slacks_ns = []
    if host.earliest_prefill_deadline_ns != NO_DEADLINE:
        queued_ns = host.queued_prefill_tokens * limits.host_prefill_ns_per_token
        prefill_ns = max(host.last_step_ns, queued_ns)
        slacks_ns.append(host.earliest_prefill_deadline_ns - now_ns - prefill_ns)
    if host.earliest_decode_deadline_ns != NO_DEADLINE:
        slacks_ns.append(host.earliest_decode_deadline_ns - now_ns - host.last_step_ns)
    # Work without any deadline: the host has no targets, so its slack is unknown, not endless.
    return share * (min(slacks_ns) - limits.safety_margin_ns) if slacks_ns else 0.0
