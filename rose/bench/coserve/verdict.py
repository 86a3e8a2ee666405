"""Limits, and what an interval says about them: HOLDS, FAILS or INCONCLUSIVE."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rose.stats import Estimate, Interval

Verdict = Literal["HOLDS", "FAILS", "INCONCLUSIVE", "REFERENCE"]
HOLDS: Verdict = "HOLDS"
FAILS: Verdict = "FAILS"
INCONCLUSIVE: Verdict = "INCONCLUSIVE"
REFERENCE: Verdict = "REFERENCE"

RATIO_LIMIT = 1.05
MIN_REQUESTS_FOR_P99 = 10_000
MIN_IDLE_EFFICIENCY, IDLE_EFFICIENCY_AT = 0.8, (0.3, 0.6)
MIN_SPARE_EFFICIENCY, SPARE_EFFICIENCY_AT = 0.5, (0.6,)
MAX_ATTAINMENT_LOSS = 0.001
MAX_GUEST_STEP_S = 0.020
YIELD_ALLOWANCE_S = 0.001


@dataclass(frozen=True, slots=True)
class Check:
    """One limit. A check that is not `decisive` is reported beside the row's verdict."""

    name: str
    value: float | None
    ci95: Interval | None
    limit: float
    verdict: Verdict
    decisive: bool = True


def at_most(name: str, found: Estimate | None, limit: float, *, decisive: bool = True) -> Check:
    """HOLDS when the interval's upper end is within the limit, FAILS when its lower end is not."""
    if found is None or found.ci95 is None:
        value = found.value if found else None
        return Check(name, value, None, limit, INCONCLUSIVE, decisive)
    low, high = found.ci95
    verdict = HOLDS if high <= limit else FAILS if low > limit else INCONCLUSIVE
    return Check(name, found.value, found.ci95, limit, verdict, decisive)


def at_least(name: str, found: Estimate | None, limit: float, *, decisive: bool = True) -> Check:
    """HOLDS when the interval's lower end reaches the limit, FAILS when its upper end does not."""
    if found is None or found.ci95 is None:
        value = found.value if found else None
        return Check(name, value, None, limit, INCONCLUSIVE, decisive)
    low, high = found.ci95
    verdict = HOLDS if low >= limit else FAILS if high < limit else INCONCLUSIVE
    return Check(name, found.value, found.ci95, limit, verdict, decisive)


def exactly_none(name: str, count: int, of: int) -> Check:
    """HOLDS when something was looked at and nothing was found."""
    verdict = FAILS if count > 0 else HOLDS if of > 0 else INCONCLUSIVE
    return Check(name, float(count), None, 0.0, verdict)


def measured_at_most(name: str, value: float | None, limit: float | None) -> Check:
    """A figure without an interval, reported beside the verdict."""
    if value is None or limit is None or not math.isfinite(value):
        return Check(name, value, None, limit or 0.0, INCONCLUSIVE, decisive=False)
    return Check(name, value, None, limit, HOLDS if value <= limit else FAILS, decisive=False)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """FAILS before INCONCLUSIVE before HOLDS; INCONCLUSIVE when there is none."""
    found = set(verdicts)
    if FAILS in found:
        return FAILS
    return HOLDS if found == {HOLDS} else INCONCLUSIVE


def row_verdict(checks: Iterable[Check]) -> Verdict:
    """Of the decisive checks."""
    return worst(check.verdict for check in checks if check.decisive)
