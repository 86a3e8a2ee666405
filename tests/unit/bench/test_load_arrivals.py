import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.protocol import LoadShape, generate_segment, rescale_trace
from rose.azure_trace import TracedRequest, read_trace
from rose.errors import RoseError

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


def test_a_load_that_cannot_be_is_refused() -> None:
    for bad in (
        {"mean_rate_per_s": 0},
        {"burst_share": 1.0},
        {"min_prompt_tokens": 100},
        {"max_output_tokens": 1},
    ):
        with pytest.raises(RoseError):
            LoadShape(**bad)  # type: ignore[arg-type] # values are numbers of either kind
    with pytest.raises(RoseError):
        rescale_trace([TracedRequest(0, 1, 1)], LoadShape())


def test_an_azure_trace_is_read_with_all_seven_decimals(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + ROW + LATER)
    first, second = read_trace(path)
    assert first == TracedRequest(0.0, 4808, 10)
    assert second.offset_s == pytest.approx(0.052, abs=1e-6)
    assert second.prompt_tokens == 3180


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("a,b,c\n" + ROW, 1),
        (HEADER + ROW + "2023-11-16 18:17:04.0,31\n", 3),
        (HEADER + ROW + "2023-11-16 18:17:04.0,many,3\n", 3),
        (HEADER + ROW + "2023-11-16 18:17:04.0,-4,3\n", 3),
        (HEADER + ROW + "yesterday,4,3\n", 3),
        (HEADER + LATER + ROW, 3),
    ],
)
def test_a_malformed_trace_is_refused_in_one_line_naming_file_and_line(
    tmp_path: Path, text: str, line: int
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(RoseError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_timestamps_may_carry_a_zone(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 00:00:02+00:00,1,1\n")
    assert read_trace(path)[1].offset_s == 1.5


def test_a_trace_that_is_missing_or_has_one_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoseError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "one.csv"
    path.write_text(HEADER + ROW)
    with pytest.raises(RoseError, match="two requests"):
        read_trace(path)
