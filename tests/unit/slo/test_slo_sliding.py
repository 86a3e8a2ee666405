"""The ring keeps the last slices and nothing else, on a clock that is handed in."""

import math
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import RELATIVE_ERROR, SketchError, SlidingSketch, percentile
from slo.sketch import TimeBuckets

# Whole milliseconds: slice borders are exact, so the model below needs no rounding rules.
moments = st.lists(st.integers(0, 200_000), max_size=60)


@given(moments, st.integers(1, 8))
def test_a_ring_holds_exactly_the_slices_of_its_window(times: list[int], slices: int) -> None:
    ring: TimeBuckets[list[int]] = TimeBuckets(8.0, slices, list)
    kept: list[int] = []
    latest = 0
    for time in times:
        held = ring.at(float(time))
        latest = max(latest, time)
        if held is not None:
            held.append(time)
            kept.append(time)
    for window in range(1, slices + 1):
        first = latest // 8 - window
        expected = sorted(t for t in kept if t // 8 > first)
        assert sorted(chain.from_iterable(ring.window(float(latest), 8.0 * window))) == expected


def test_a_clock_that_went_back_sees_nothing_of_its_future() -> None:
    ring: TimeBuckets[list[int]] = TimeBuckets(10.0, 3, list)
    assert ring.at(100.0) is not None
    assert ring.window(50.0) == []
    assert ring.at(70.0) is None


@pytest.mark.parametrize(("slice_s", "slices"), [(0.0, 3), (-1.0, 3), (math.nan, 3), (1.0, 0)])
def test_a_ring_without_size_is_refused(slice_s: float, slices: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TimeBuckets(slice_s, slices, list)


@pytest.mark.parametrize("window_s", [0.0, 31.0])
def test_a_window_the_ring_cannot_hold_is_refused(window_s: float) -> None:
    with pytest.raises(ValueError, match="holds up to"):
        TimeBuckets(10.0, 3, list).window(100.0, window_s)


@given(
    st.lists(st.tuples(st.floats(1e-3, 100), st.integers(0, 40)), min_size=1, max_size=80),
    st.floats(0.01, 1),
)
def test_window_quantiles_are_within_one_percent(
    arrivals: list[tuple[float, int]], fraction: float
) -> None:
    sliding = SlidingSketch(slice_s=10.0, slices=4)
    now = max(time for _, time in arrivals)
    for value, time in sorted(arrivals, key=lambda arrival: arrival[1]):
        assert sliding.insert(value, float(time))
    recent = [value for value, time in arrivals if time // 10 > now // 10 - 2]
    estimate = sliding.quantile(fraction, float(now), 20.0)
    assert sliding.count(float(now), 20.0) == len(recent)
    exact = percentile(recent, fraction)
    assert estimate is not None
    assert abs(estimate - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


def test_old_slices_are_dropped_and_an_empty_window_has_no_quantile() -> None:
    sliding = SlidingSketch(slice_s=10.0, slices=3)
    sliding.insert(1.0, 5.0)
    assert sliding.count(29.0) == 1
    assert sliding.count(30.0) == 0
    assert sliding.quantile(0.99, 30.0) is None
    assert sliding.insert(2.0, 35.0)
    assert not sliding.insert(1.0, 5.0)
    assert sliding.count(35.0) == 1


def test_a_late_value_goes_to_the_slice_it_belongs_to() -> None:
    sliding = SlidingSketch(slice_s=10.0, slices=3)
    sliding.insert(1.0, 25.0)
    assert sliding.insert(9.0, 15.0)
    assert sliding.insert(1.0, 26.0)
    assert sliding.count(26.0, 10.0) == 2
    assert sliding.count(26.0, 20.0) == 3


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_what_is_no_latency_is_refused_whatever_the_time(bad: float) -> None:
    sliding = SlidingSketch()
    for now_s in (0.0, 0.0, 1e6):
        with pytest.raises(SketchError):
            sliding.insert(bad, now_s)
    assert sliding.count(1e6) == 0


def test_extremes_are_counted_like_any_value() -> None:
    sliding = SlidingSketch()
    sliding.insert(1.0, 0.0)
    sliding.insert(0.0, 0.0)
    sliding.insert(1e9, 0.0)
    assert sliding.count(0.0) == 3
