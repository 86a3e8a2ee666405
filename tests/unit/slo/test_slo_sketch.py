"""A sketch estimates within its error, merges without loss, and stays small."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo import RELATIVE_ERROR, Sketch, SketchError, latency_bounds_s, percentile
from slo.sketch import BUCKETS, MAX_S, MIN_S

in_range = st.floats(MIN_S, MAX_S, exclude_max=True)
many = st.lists(in_range, min_size=1, max_size=200)
fractions = st.floats(0.001, 1)


def sketch_of(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.insert(value)
    return sketch


@given(many, fractions)
def test_a_quantile_is_within_one_percent_of_the_exact_one(
    values: list[float], fraction: float
) -> None:
    estimate = sketch_of(values).quantile(fraction)
    exact = percentile(values, fraction)
    assert estimate is not None
    assert abs(estimate - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)
    assert RELATIVE_ERROR <= 0.01


@pytest.mark.parametrize("power", range(-20, 14))
def test_bucket_edges_are_within_the_error_too(power: int) -> None:
    for step in range(36):
        edge = 2.0 ** (power + step / 36)
        for value in (math.nextafter(edge, 0), edge, math.nextafter(edge, math.inf)):
            if MIN_S <= value < MAX_S:
                assert sketch_of([value]).quantile(1) == pytest.approx(value, rel=0.00963)


@given(many)
def test_count_is_exact_and_sum_within_the_error(values: list[float]) -> None:
    sketch = sketch_of(values)
    assert sketch.count == len(values)
    assert sketch.sum_s == pytest.approx(sum(values), rel=0.01)


@given(many, many)
def test_merging_equals_having_seen_both(some: list[float], others: list[float]) -> None:
    merged = sketch_of(some)
    merged.merge(sketch_of(others))
    assert merged == sketch_of(some + others)


@given(many)
def test_inserting_many_equals_inserting_each(values: list[float]) -> None:
    sketch = Sketch()
    sketch.insert_all([0.0, *values, 1e9])
    assert sketch == sketch_of([0.0, *values, 1e9])


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_bytes_carry_the_whole_sketch(values: list[float]) -> None:
    sketch = sketch_of(values)
    assert Sketch.from_bytes(sketch.to_bytes()) == sketch


@given(st.binary(max_size=60))
def test_foreign_bytes_are_refused_not_misread(data: bytes) -> None:
    with pytest.raises(SketchError):
        Sketch.from_bytes(data)


@given(st.data(), many)
def test_damaged_bytes_are_refused_or_a_sketch_with_sound_counts(
    data: st.DataObject, values: list[float]
) -> None:
    raw = bytearray(sketch_of(values).to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        sketch = Sketch.from_bytes(bytes(raw))
    except SketchError:
        return
    assert len(sketch.counts) == BUCKETS
    assert all(count >= 0 for count in sketch.counts)


def test_values_outside_the_range_are_counted_at_its_ends() -> None:
    sketch = sketch_of([0.0, 1e-9, 1e9])
    assert (sketch.count, sketch.quantile(0.5), sketch.quantile(1)) == (3, MIN_S, MAX_S)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_latency_is_refused(bad: float) -> None:
    sketch = Sketch()
    with pytest.raises(SketchError, match="give seconds"):
        sketch.insert(bad)
    with pytest.raises(SketchError, match="give seconds"):
        sketch.insert_all([bad])
    assert sketch.count == 0


def test_no_values_have_no_quantile() -> None:
    assert Sketch().quantile(0.99) is None
    assert Sketch().sum_s == 0
    with pytest.raises(ValueError, match="fraction"):
        Sketch().quantile(0)


def test_memory_is_bounded_however_many_values_it_took() -> None:
    sketch = Sketch()
    sketch.counts = [2**62 + index for index in range(BUCKETS)]
    held = sys.getsizeof(sketch.counts) + sum(map(sys.getsizeof, sketch.counts))
    assert held < 55_000


@given(many, st.floats(0.001, 100))
def test_exported_buckets_contain_the_targets_and_count_within_the_error(
    values: list[float], target_s: float
) -> None:
    histogram = sketch_of(values).histogram(latency_bounds_s(target_s, 0.5))
    assert {target_s, 0.5} <= set(histogram.bounds_s)
    assert histogram.count == len(values)
    for bound_s in histogram.bounds_s:
        surely = sum(v <= bound_s * (1 - RELATIVE_ERROR) for v in values)
        possibly = sum(v <= bound_s * (1 + 2 * RELATIVE_ERROR) for v in values)
        assert surely <= histogram.at_most(bound_s) <= possibly
    assert [le for le, _ in histogram.buckets()][-1] == "+Inf"
