"""Burn rates and alerts follow the SRE workbook, and silence burns nothing."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import RULES, BurnRule, ErrorBudget
from slo.error_budget import CountRing

HOUR = 3600.0
DAY = 24 * HOUR
PAGE_FAST, PAGE_SLOW, *_ = RULES


def run(budget: ErrorBudget, start_s: float, seconds: float, bad_share: float) -> float:
    """A thousand requests a minute, `bad_share` of them bad; returns the time after the last."""
    now_s = start_s
    while now_s < start_s + seconds:
        bad = round(1000 * bad_share)
        budget.add(now_s, 1000 - bad, bad)
        now_s += 60.0
    return now_s - 1.0


def test_thresholds_are_the_workbook_s() -> None:
    assert [rule.threshold(30 * DAY) for rule in RULES] == pytest.approx([14.4, 6.0, 3.0, 1.0])
    assert [(r.severity, r.long_s / HOUR, r.short_s / HOUR) for r in RULES] == [
        ("page", 1, 1 / 12),
        ("page", 6, 0.5),
        ("ticket", 24, 2),
        ("ticket", 72, 6),
    ]


windows = st.sampled_from([300.0, HOUR, 6 * HOUR])


@given(st.floats(0.5, 1.0), st.floats(0, 1e9), windows)
def test_no_traffic_burns_nothing_and_alerts_nobody(
    objective: float, now_s: float, window_s: float
) -> None:
    budget = ErrorBudget(objective)
    assert budget.burn_rate(now_s, window_s) == 0.0
    assert budget.alerts(now_s) == ()


@given(st.floats(0.5, 0.999), st.integers(0, 1000), st.integers(0, 1000), windows)
def test_burn_is_the_bad_share_over_the_allowed_share(
    objective: float, good: int, bad: int, window_s: float
) -> None:
    budget = ErrorBudget(objective)
    budget.add(1e6, good, bad)
    share = bad / (good + bad) if good + bad else 0.0
    assert budget.burn_rate(1e6, window_s) == pytest.approx(share / (1 - objective))


@pytest.mark.parametrize(
    ("bad_share", "seconds", "fired"),
    [
        (0.15, 2 * HOUR, {PAGE_FAST, PAGE_SLOW}),
        (0.07, 12 * HOUR, {PAGE_SLOW}),
        (0.04, 12 * HOUR, set()),
    ],
)
def test_each_steady_burn_fires_its_rules(
    bad_share: float, seconds: float, fired: set[BurnRule]
) -> None:
    budget = ErrorBudget(0.99)
    now_s = run(budget, 0.0, seconds, bad_share)
    assert {alert.rule for alert in budget.alerts(now_s)} == fired


def test_an_alert_ends_soon_after_its_cause() -> None:
    budget = ErrorBudget(0.99)
    broken_until_s = run(budget, 0.0, HOUR, 0.5)
    assert PAGE_FAST in {alert.rule for alert in budget.alerts(broken_until_s)}
    now_s = run(budget, HOUR, 360.0, 0.0)
    assert budget.burn_rate(now_s, HOUR) > 14.4
    assert PAGE_FAST not in {alert.rule for alert in budget.alerts(now_s)}


def test_an_alert_says_how_fast_both_windows_burn() -> None:
    budget = ErrorBudget(0.99)
    now_s = run(budget, 0.0, 2 * HOUR, 0.2)
    alert = budget.alerts(now_s)[0]
    assert (alert.long_burn, alert.short_burn) == (pytest.approx(20), pytest.approx(20))


def test_a_perfect_objective_burns_without_end_on_one_miss_and_never_nan() -> None:
    budget = ErrorBudget(1.0)
    budget.add(0.0, 10, 0)
    assert budget.burn_rate(0.0, HOUR) == 0.0
    budget.add(0.0, 0, 1)
    assert budget.burn_rate(0.0, HOUR) == math.inf


def test_requests_of_long_ago_disturb_nothing() -> None:
    budget = ErrorBudget(0.99)
    budget.add(100 * DAY, 10, 0)
    budget.add(0.0, 0, 10)
    assert budget.counts(100 * DAY, 6 * HOUR) == (10, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(ErrorBudget, objective), "fraction") for objective in (0.0, 1.1, math.nan)),
        (lambda: ErrorBudget(0.9).add(0.0, -1, 0), "negative"),
        (lambda: ErrorBudget(0.9).burn_rate(0.0, 7 * HOUR), "at most six hours"),
        *(
            (partial(CountRing, slice_s, 3), "must be positive")
            for slice_s in (0.0, -1.0, math.nan)
        ),
        (lambda: CountRing(1.0, 0), "must be positive"),
        (lambda: CountRing(10.0, 3).counts(100.0, 0.0), "holds up to"),
        (lambda: CountRing(10.0, 3).counts(100.0, 31.0), "holds up to"),
    ],
)
def test_senseless_objectives_counts_periods_and_windows_are_refused(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# Whole seconds: slice borders are exact, so the model below needs no rounding rules.
moments = st.lists(st.integers(0, 200), max_size=60)


@given(moments, st.integers(1, 8))
def test_a_ring_holds_exactly_the_slices_of_its_window(times: list[int], slices: int) -> None:
    ring, kept, latest = CountRing(8.0, slices), list[int](), 0
    for time in times:
        latest = max(latest, time)
        place = (time // 8) % slices
        if all(other // 8 <= time // 8 for other in kept if (other // 8) % slices == place):
            kept.append(time)
        ring.add(float(time), 1, time)
    for window in range(1, slices + 1):
        seen = [time for time in kept if time // 8 > latest // 8 - window]
        assert ring.counts(float(latest), 8.0 * window) == (len(seen), sum(seen))


def test_a_ring_lists_the_slices_that_have_requests() -> None:
    ring = CountRing(10.0, 3)
    for at_s in (0.0, 21.0, 29.0, 45.0):
        ring.add(at_s, 1, 2)
    assert ring.slices(49.0) == [(20.0, 2, 4), (40.0, 1, 2)]
    assert ring.slices(39.0) == [(20.0, 2, 4)], "nothing of its future"


def test_a_clock_that_went_back_sees_nothing_of_its_future() -> None:
    ring = CountRing(10.0, 3)
    ring.add(100.0, 1, 0)
    assert ring.counts(50.0, 30.0) == (0, 0)
    ring.add(70.0, 5, 5)
    assert ring.counts(100.0, 30.0) == (1, 0)
