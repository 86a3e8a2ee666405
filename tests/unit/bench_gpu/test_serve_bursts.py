"""Bursts without the trace: what is generated has the trace's figures, and the same again."""

from collections import Counter
from pathlib import Path

import pytest

from bench.gpu.serve.bursts import burst_windows, figures_of, write_generated
from bench.load.arrivals import LoadShape, rescale_trace, trace_segment
from rose.azure_trace import TracedRequest, read_trace

ARM_S = 10.0


@pytest.fixture(scope="module", params=[0, 1, 2])
def generated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bursts") / "a.csv"
    write_generated(path, request.param)
    return path


def test_generated_bursts_have_the_figures_of_the_azure_trace(generated: Path) -> None:
    trace = read_trace(generated)
    found = figures_of(trace)
    assert found.mean_per_s == pytest.approx(2.57, rel=0.01)
    assert found.peak_per_s == 67
    assert 10.5 < found.cv < 15.5
    assert 8_000 < found.requests < 10_000
    prompts = sorted(request.prompt_tokens for request in trace)
    assert prompts[len(prompts) // 2] == pytest.approx(1_469, rel=0.1)
    outputs = sorted(request.output_tokens for request in trace)
    assert outputs[len(outputs) // 2] == pytest.approx(13, rel=0.1)


def test_the_same_seed_gives_the_same_bursts(generated: Path, tmp_path: Path) -> None:
    texts = set()
    for name, seed in (("b", 7), ("c", 7), ("d", 8)):
        write_generated(tmp_path / name, seed)
        texts.add((tmp_path / name).read_text())
    assert len(texts) == 2


def test_the_first_window_has_the_peak_and_no_window_is_silent(generated: Path) -> None:
    trace = read_trace(generated)
    windows = burst_windows(trace, ARM_S, 6, seed=0)
    assert len(windows) == len(set(windows)) == 6
    # The load generator plays them at the trace's own pace.
    shape = LoadShape(mean_rate_per_s=figures_of(trace).mean_per_s, segment_s=ARM_S)
    played = rescale_trace(trace, shape)
    segments = [trace_segment(played, ARM_S, window) for window in windows]
    assert max(Counter(int(a.offset_s) for a in segments[0]).values()) >= 60
    assert all(len(segment) >= 2.5 * ARM_S for segment in segments)
    assert windows != burst_windows(trace, ARM_S, 6, seed=1)


def test_a_short_trace_has_windows_too() -> None:
    trace = [TracedRequest(at, 10, 10) for at in (0.0, 1.0, 2.0)]
    assert burst_windows(trace, ARM_S, 2, seed=0) == [0, 0]
