"""Error budget and burn alerts, as the Google SRE workbook defines them (ch. 5, Alerting on SLOs).

The budget of an objective of 99% over 30 days is 1% of the requests of those days. Burn rate 1
spends it in exactly the period; an alert "2% at 1 h" is a burn rate of 0.02 × 30 d ÷ 1 h = 14.4.
"""

import math
from dataclasses import dataclass
from typing import Final

MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0
PERIOD_S: Final = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class BurnRule:
    """Alert rule: fires while two windows burn `budget_share` of the budget per `long_s`.

    The long window (`long_s`) says that it matters, the short one (`short_s`) that it goes on: an
    alert ends soon after its cause does.
    """

    severity: str
    budget_share: float
    long_s: float
    short_s: float

    def threshold(self, period_s: float) -> float:
        """Return the burn rate that spends `budget_share` of the period's budget in `long_s`."""
        return self.budget_share * period_s / self.long_s


RULES: Final = (
    BurnRule("page", 0.02, HOUR_S, 5 * MINUTE_S),
    BurnRule("page", 0.05, 6 * HOUR_S, 30 * MINUTE_S),
    BurnRule("ticket", 0.10, DAY_S, 2 * HOUR_S),
    BurnRule("ticket", 0.10, 3 * DAY_S, 6 * HOUR_S),
)
PAGING: Final = tuple(rule for rule in RULES if rule.severity == "page")


@dataclass(frozen=True, slots=True)
class BurnAlert:
    """Rule that fires now, and the burn rates of its two windows."""

    rule: BurnRule
    long_burn: float
    short_burn: float


def burnt(good: int, bad: int, objective: float) -> float:
    """Return the burn rate: share of bad requests ÷ share that may be bad, `1 - objective`.

    0 without bad requests; infinite where none may be bad and one was.
    """
    if not bad:
        return 0.0
    allowed = 1.0 - objective
    return bad / (good + bad) / allowed if allowed else math.inf


class CountRing:
    """Counts of good and bad requests in the last `slices` spans of `slice_s` seconds.

    A slice that fell out of the ring is replaced when its place is needed. Slices ahead of the
    asked time are ignored: after a clock goes back, counts of its former future do not show. Raises
    ValueError unless both sizes are positive.
    """

    def __init__(self, slice_s: float, slices: int) -> None:
        if not (math.isfinite(slice_s) and slice_s > 0 and slices > 0):
            raise ValueError(f"ring of {slices} slices of {slice_s} s; both must be positive")
        self.slice_s = slice_s
        self.span_s = slice_s * slices
        # By place: number of the slice, good and bad requests in it.
        self._places: list[tuple[float, int, int]] = [(-math.inf, 0, 0)] * slices

    def add(self, now_s: float, good: int, bad: int) -> None:
        """Add requests to the slice of `now_s`, unless its place holds a later slice."""
        number = math.floor(now_s / self.slice_s)
        place = number % len(self._places)
        held, held_good, held_bad = self._places[place]
        if held == number:
            good, bad = good + held_good, bad + held_bad
        if held <= number:
            self._places[place] = number, good, bad

    def counts(self, now_s: float, window_s: float) -> tuple[int, int]:
        """Return (good, bad) requests of the last `window_s` seconds, the running slice included.

        Whole slices: up to one slice of time less than asked for. Raises ValueError for a window
        that the ring cannot hold.
        """
        if not 0 < window_s <= self.span_s:
            raise ValueError(f"window of {window_s} s; the ring holds up to {self.span_s} s")
        last = math.floor(now_s / self.slice_s)
        first = last - math.ceil(window_s / self.slice_s - 1e-9)
        held = [(good, bad) for number, good, bad in self._places if first < number <= last]
        return sum(good for good, _ in held), sum(bad for _, bad in held)

    def slices(self, now_s: float) -> list[tuple[float, int, int]]:
        """Return the begin of each slice with requests in the ring's span, and its (good, bad)."""
        last = math.floor(now_s / self.slice_s)
        held = (each for each in self._places if last - len(self._places) < each[0] <= last)
        return [(number * self.slice_s, good, bad) for number, good, bad in sorted(held)]


class ErrorBudget:
    """Error budget over 30 days from counts of good and bad requests, for the rules that page.

    The clock is passed in. Two rings of 136 slices hold the windows of the rules that page, and
    none above six hours; requests reported later than that are left out. Raises ValueError unless
    `objective` lies in (0, 1].
    """

    def __init__(self, objective: float) -> None:
        if not 0 < objective <= 1:
            raise ValueError(f"objective is {objective}; give a fraction in (0, 1]")
        self.objective = objective
        # One slice more than the window: the running slice is not full yet.
        self._rings = CountRing(MINUTE_S, 62), CountRing(5 * MINUTE_S, 74)

    def add(self, now_s: float, good: int, bad: int) -> None:
        """Count requests that ended at `now_s`. Raises ValueError for a negative count."""
        if good < 0 or bad < 0:
            raise ValueError(f"counts are {good} good, {bad} bad; they cannot be negative")
        for ring in self._rings:
            ring.add(now_s, good, bad)

    def burn_rate(self, now_s: float, window_s: float) -> float:
        """Return share of bad requests ÷ share that may be bad, over the last `window_s` seconds.

        0 without traffic, infinite where nothing may be bad and something was, never NaN. Raises
        ValueError for a window above six hours.
        """
        good, bad = self.counts(now_s, window_s)
        return burnt(good, bad, self.objective)

    def alerts(self, now_s: float, rules: tuple[BurnRule, ...] = PAGING) -> tuple[BurnAlert, ...]:
        """Return an alert for each rule whose windows both burn at least as fast as allowed."""
        fired = []
        for rule in rules:
            long_burn = self.burn_rate(now_s, rule.long_s)
            short_burn = self.burn_rate(now_s, rule.short_s)
            if min(long_burn, short_burn) >= rule.threshold(PERIOD_S):
                fired.append(BurnAlert(rule, long_burn, short_burn))
        return tuple(fired)

    def counts(self, now_s: float, window_s: float) -> tuple[int, int]:
        """Return (good, bad) requests of the last `window_s` seconds. Raises ValueError."""
        # The finest ring that holds the window and the slice that is still running.
        for ring in self._rings:
            if window_s + ring.slice_s <= ring.span_s + 1e-6:
                return ring.counts(now_s, window_s)
        raise ValueError(f"window of {window_s} s; give at most six hours")
