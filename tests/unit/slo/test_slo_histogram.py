"""Histograms as Prometheus means them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import Histogram

SEEN = Histogram((1.0, 2.0), (2, 6, 9), 18.0)


def test_a_target_between_bounds_counts_only_what_certainly_met_it() -> None:
    seen = Histogram((1.0, 2.5), (3, 8, 9), 12.0)
    assert [seen.at_most(bound) for bound in (0.5, 1.0, 2.0, 2.5, 99.0)] == [0, 3, 3, 8, 8]


def test_quantiles_are_linear_inside_a_bucket_and_end_at_the_last_bound() -> None:
    seen = Histogram((1.0, 2.0), (4, 8, 10), 0.0)
    assert [seen.quantile(q) for q in (0.2, 0.4, 0.6, 1.0)] == [0.5, 1.0, 1.5, 2.0]


def test_no_values_have_no_quantile() -> None:
    assert Histogram((1.0,), (0, 0), 0.0).quantile(0.9) is None


def test_growth_is_what_was_observed_in_between() -> None:
    later = Histogram((1.0, 2.0), (3, 8, 12), 25.0)
    assert later.since(SEEN) == Histogram((1.0, 2.0), (1, 2, 3), 7.0)
    assert SEEN.since(later) is None
    assert SEEN.since(Histogram((1.0,), (0, 0), 0.0)) is None


def test_a_histogram_that_was_reset_and_refilled_unevenly_did_not_grow() -> None:
    assert Histogram((1.0, 2.0), (0, 9, 20), 30.0).since(SEEN) is None
    # Every count rose here, yet the bucket between 1 and 2 lost two.
    assert Histogram((1.0, 2.0), (5, 7, 10), 30.0).since(SEEN) is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_export_is_cumulative_and_ends_with_everything(steps: list[int]) -> None:
    counts = tuple(sum(steps[: i + 1]) for i in range(4))
    exported = Histogram((0.5, 1.0, 2.0), counts, 1.0).buckets()
    assert [le for le, _ in exported] == ["0.5", "1.0", "2.0", "+Inf"]
    assert [count for _, count in exported] == list(map(float, counts))


@pytest.mark.parametrize(
    ("bounds", "counts"), [((1.0,), (1,)), ((2.0, 1.0), (0, 0, 0)), ((1.0, 2.0), (3, 2, 4))]
)
def test_what_is_no_histogram_is_refused(
    bounds: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"counts|ascend"):
        Histogram(bounds, counts, 0.0)
