"""The forecast follows load, leaves room for bursts, and knows silence."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import LoadForecast


def fed(rates: list[float], slice_s: float = 10.0) -> tuple[LoadForecast, float]:
    """A forecast after one slice of each rate, and the time then."""
    forecast = LoadForecast(slice_s)
    for index, rate in enumerate(rates):
        forecast.add(index * slice_s, rate * slice_s)
    return forecast, len(rates) * slice_s


@given(st.floats(0, 1e9), st.floats(0, 1e5))
def test_no_traffic_is_zero_load(now_s: float, ahead_s: float) -> None:
    forecast = LoadForecast()
    assert forecast.expected(now_s, ahead_s) == 0.0
    assert forecast.peak(now_s, ahead_s) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e9)), max_size=40), st.floats(0, 1e5))
def test_load_is_never_negative_nor_nan(
    arrivals: list[tuple[float, float]], ahead_s: float
) -> None:
    forecast = LoadForecast()
    now_s = 0.0
    for gap_s, amount in arrivals:
        now_s += gap_s
        forecast.add(now_s, amount)
        assert 0 <= forecast.expected(now_s, ahead_s) <= forecast.peak(now_s, ahead_s) < math.inf


@given(st.floats(0.1, 1e6), st.floats(0, 1000))
def test_steady_load_is_forecast_as_it_is(rate: float, ahead_s: float) -> None:
    forecast, now_s = fed([rate] * 50)
    assert forecast.expected(now_s, ahead_s) == pytest.approx(rate)
    assert forecast.peak(now_s, ahead_s) == pytest.approx(rate)


def test_silence_after_load_becomes_exactly_zero() -> None:
    forecast, now_s = fed([100.0] * 30)
    soon = forecast.expected(now_s + 30.0)
    assert 0 < soon < 100
    assert forecast.expected(now_s + 610.0) == 0.0
    assert forecast.peak(now_s + 610.0) == 0.0
    forecast.add(now_s + 700.0, 500.0)
    assert forecast.expected(now_s + 710.0) > 0


def test_climbing_load_is_forecast_higher_ahead_but_not_for_ever() -> None:
    forecast, now_s = fed([float(rate) for rate in range(0, 400, 10)])
    ahead = [forecast.expected(now_s, ahead_s) for ahead_s in (10, 60, 600, 1e6)]
    assert ahead == sorted(ahead)
    assert ahead[1] > ahead[0]
    assert ahead[3] < 2 * ahead[0]


def test_bursts_raise_the_peak_not_the_expectation() -> None:
    calm, now_s = fed([100.0] * 60)
    bursty, _ = fed([100.0] * 9 + [300.0] + ([100.0] * 9 + [300.0]) * 5)
    assert bursty.peak(now_s) >= 250
    assert bursty.expected(now_s) < bursty.peak(now_s) - 100
    assert calm.peak(now_s) == pytest.approx(100)


def test_a_day_of_silence_costs_no_more_than_its_memory() -> None:
    forecast, now_s = fed([100.0])
    assert forecast.expected(now_s + 1e12) == 0.0


def test_a_clock_that_went_back_changes_nothing() -> None:
    forecast, now_s = fed([100.0] * 10)
    before = forecast.expected(now_s)
    assert forecast.expected(now_s - 50.0) == before


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_senseless_load_is_refused(amount: float) -> None:
    with pytest.raises(ValueError, match="finite amount"):
        LoadForecast().add(0.0, amount)


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        LoadForecast(slice_s=0.0)
    with pytest.raises(ValueError, match="positive"):
        LoadForecast(memory=0)
