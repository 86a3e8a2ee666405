import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.protocol import LoadShape, generate_segment, rescale_trace
from rose.azure_trace import TracedRequest, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.9799600,4808,10\n"
LATER = "2023-11-16 18:17:04.0319600,3180,8\n"


@given(seed=st.integers(0, 10_000), segment=st.integers(0, 100))
def test_a_replayed_segment_is_identical_ordered_and_within_its_limits(
    seed: int, segment: int
) -> None:
    shape = LoadShape(segment_s=30)
    arrivals = generate_segment(shape, seed, segment)
    assert arrivals == generate_segment(shape, seed, segment)
    offsets = [arrival.offset_s for arrival in arrivals]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= 30 for offset in offsets)
    assert all(8 <= arrival.prompt_tokens <= 96 for arrival in arrivals)
    assert all(4 <= arrival.output_tokens <= 16 for arrival in arrivals)


def test_the_load_is_bursty_and_its_mean_rate_comes_out() -> None:
    shape = LoadShape(mean_rate_per_s=5, segment_s=3600)
    arrivals = generate_segment(shape, 1, 0)
    assert len(arrivals) / 3600 == pytest.approx(5, rel=0.1)
    per_second = [0] * 3600
    for arrival in arrivals:
        per_second[min(3599, int(arrival.offset_s))] += 1
    # A Poisson load has an index of dispersion of 1.
    assert statistics.variance(per_second) / statistics.mean(per_second) > 3


def test_a_rescaled_trace_has_the_target_rate_and_lengths_the_host_can_serve() -> None:
    trace = [TracedRequest(k * k * 0.01, 100 + 70 * k, 10 + k) for k in range(200)]
    rescaled = rescale_trace(trace, LoadShape(mean_rate_per_s=8))
    assert len(rescaled) / rescaled[-1].offset_s == pytest.approx(8)
    assert all(8 <= a.prompt_tokens <= 96 and 4 <= a.output_tokens <= 16 for a in rescaled)
    assert rescaled[150].offset_s / rescaled[75].offset_s == pytest.approx(4, rel=1e-3)


def test_an_azure_trace_is_read_with_all_seven_decimals(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + ROW + LATER)
    first, second = read_trace(path)
    assert first == TracedRequest(0.0, 4808, 10)
    assert second.offset_s == pytest.approx(0.052, abs=1e-6)
    assert second.prompt_tokens == 3180
