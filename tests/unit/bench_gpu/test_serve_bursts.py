"""Windows of a bursty trace: the peak first, then others that are not silent."""

from collections import Counter
from pathlib import Path

import pytest

from bench.gpu.loads import burst_figures, burst_windows
from bench.load.protocol import LoadShape, rescale_trace, trace_segment, write_trace
from rose.azure_trace import TracedRequest, read_trace

ARM_S = 10.0


@pytest.fixture(scope="module", params=[0, 1, 2])
def generated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bursts") / "a.csv"
    write_trace(path, request.param, hours=1.0)
    return path


def test_the_first_window_has_the_peak_and_no_window_is_silent(generated: Path) -> None:
    trace = read_trace(generated)
    windows = burst_windows(trace, ARM_S, 6, seed=0)
    assert len(windows) == len(set(windows)) == 6
    # The load generator plays them at the trace's own pace.
    shape = LoadShape(mean_rate_per_s=burst_figures(trace)["mean_per_s"], segment_s=ARM_S)
    played = rescale_trace(trace, shape)
    segments = [trace_segment(played, ARM_S, window) for window in windows]
    peak = burst_figures(trace)["peak_per_s"]
    assert max(Counter(int(a.offset_s) for a in segments[0]).values()) >= 0.8 * peak > 20
    assert all(len(segment) >= 2.5 * ARM_S for segment in segments)
    assert windows != burst_windows(trace, ARM_S, 6, seed=1)


def test_a_short_trace_has_windows_too() -> None:
    trace = [TracedRequest(at, 10, 10) for at in (0.0, 1.0, 2.0)]
    assert burst_windows(trace, ARM_S, 2, seed=0) == [0, 0]
