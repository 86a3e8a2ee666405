"""Dual slack: the time left before a host request would miss its TTFT or its TPOT target.

prefill slack = arrival + TTFT target − now − predicted prefill
decode slack  = last token + TPOT target − now − predicted decode
(ROSE paper, 2026.) Deadlines are the first two terms; all times are CLOCK_MONOTONIC nanoseconds.
"""

from dataclasses import dataclass

NO_DEADLINE = 0
"""Value of a deadline when no request waits for that kind of token."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Nanoseconds left; negative when already late, None when nothing waits."""

    prefill_ns: int | None
    decode_ns: int | None

    @property
    def tightest_ns(self) -> int | None:
        """The smaller of both, None when nothing waits."""
        known = [value for value in (self.prefill_ns, self.decode_ns) if value is not None]
        return min(known) if known else None


def prefill_deadline_ns(arrival_ns: int, ttft_ns: int) -> int:
    """When the first token is due."""
    return arrival_ns + ttft_ns


def decode_deadline_ns(last_token_ns: int, tpot_ns: int) -> int:
    """When the next token is due."""
    return last_token_ns + tpot_ns


def slack_until(deadline_ns: int, now_ns: int, predicted_ns: int) -> int | None:
    """Time that may be given away before `deadline_ns`, None for NO_DEADLINE."""
    return None if deadline_ns == NO_DEADLINE else deadline_ns - now_ns - predicted_ns


def dual_slack(
    *,
    prefill_deadline_ns: int,
    decode_deadline_ns: int,
    now_ns: int,
    predicted_prefill_ns: int,
    predicted_decode_ns: int,
) -> Slack:
    """Both slacks of a host from its earliest deadlines and its predicted own work."""
    return Slack(
        slack_until(prefill_deadline_ns, now_ns, predicted_prefill_ns),
        slack_until(decode_deadline_ns, now_ns, predicted_decode_ns),
    )
