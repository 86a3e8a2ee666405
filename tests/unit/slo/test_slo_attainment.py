"""Attainment, goodput and percentiles are exact counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import Attainment, RequestLatency, SloSpec, attainment, goodput_rps, percentile

SPEC = SloSpec("m", ttft_s=0.5, tpot_s=0.15, percentile=0.9)
STRICT = SloSpec("m", ttft_s=0.5, tpot_s=0.15, itl_s=0.3, e2e_s=2.0)


def latency(
    ttft_s: float, tpot_s: float, itl_max_s: float | None = None, e2e_s: float | None = None
) -> RequestLatency:
    whole_s = ttft_s + 10 * tpot_s if e2e_s is None else e2e_s
    return RequestLatency("r", ttft_s, tpot_s, whole_s, 5, 11, itl_max_s)


def test_a_request_is_good_only_when_it_meets_both_targets() -> None:
    counts = attainment([latency(0.5, 0.15), latency(0.6, 0.1), latency(0.1, 0.2)], SPEC)
    assert (counts.requests, counts.good, counts.ttft_met, counts.tpot_met) == (3, 1, 2, 2)
    assert (counts.itl_met, counts.e2e_met, counts.bad) == (3, 3, 2)
    assert counts.fraction == pytest.approx(1 / 3)
    assert latency(0.5, 0.15).meets(SPEC)


def test_gap_and_end_to_end_targets_count_where_they_are_promised() -> None:
    counts = attainment(
        [latency(0.1, 0.1, 0.3, 2.0), latency(0.1, 0.1, 0.4, 1.0), latency(0.1, 0.1, 0.1, 2.1)],
        STRICT,
    )
    assert (counts.good, counts.itl_met, counts.e2e_met) == (1, 2, 2)


def test_a_gap_target_without_measured_gaps_is_an_error_not_a_pass() -> None:
    with pytest.raises(ValueError, match="measure token gaps or drop itl_s"):
        latency(0.1, 0.1).meets(STRICT)


latencies = st.lists(st.builds(latency, st.floats(0, 1), st.floats(0, 0.3)), max_size=30)


@given(latencies, latencies)
def test_attainment_of_two_sets_is_the_sum_of_both(
    some: list[RequestLatency], others: list[RequestLatency]
) -> None:
    assert attainment(some + others, SPEC) == attainment(some, SPEC) + attainment(others, SPEC)


def test_no_traffic_misses_nothing_and_is_no_goodput() -> None:
    assert attainment([], SPEC) == Attainment()
    assert Attainment().fraction == 1.0
    assert goodput_rps([], SPEC, 10) == 0


def test_goodput_counts_good_requests_per_second() -> None:
    assert goodput_rps([latency(0.1, 0.1)] * 6 + [latency(9, 9)], SPEC, 3.0) == 2.0
    with pytest.raises(ValueError, match="window_s"):
        goodput_rps([], SPEC, 0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200), st.floats(0.001, 1))
def test_percentile_is_the_smallest_value_that_covers_the_fraction(
    values: list[float], fraction: float
) -> None:
    found = percentile(values, fraction)
    covered = sum(v <= found for v in values)
    below = sum(v < found for v in values)
    assert covered >= fraction * len(values) - 1e-6
    assert below < fraction * len(values) + 1e-6


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="fraction"):
        percentile([1.0], 0)
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
