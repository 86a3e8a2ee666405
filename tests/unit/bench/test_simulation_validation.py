"""The simulator's validation plays what was measured, and compares with the spread of repeats."""

import pytest

import bench.simulation as validation
from bench.simulation import (
    EngineSizes,
    MeasuredLoad,
    MeasuredRepeat,
    MeasuredRun,
    ValidationRow,
    summary,
    table,
    validate,
)
from slo import StepProfile

ARRIVALS = tuple((0.1 * n, 30, 8) for n in range(10))
REPEATS = (
    MeasuredRepeat(10, 0.018, 0.021, 0.0051, 0.0061, 80.0, 0.0),
    MeasuredRepeat(10, 0.019, 0.022, 0.0052, 0.0062, 80.0, 0.0),
)
HOST = EngineSizes(3_640, 18_432, 64, StepProfile(0.005, 1e-4))
GUEST = EngineSizes(4_096, 4_096, 16, StepProfile(0.003, 3e-5))
LENT = MeasuredRepeat(10, 0.018, 0.021, 0.0051, 0.0061, 80.0, 900.0)
LOADS = (
    MeasuredLoad("first", 1.0, ARRIVALS, REPEATS, ()),
    MeasuredLoad("second", 1.0, ARRIVALS, REPEATS, (LENT,)),
)
RUN = MeasuredRun(0, "2 cores", 2.0, 0.2, HOST, GUEST, 16, 32, 64, 2_800.0, LOADS)


def test_the_first_load_calibrates_and_all_others_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "GUEST_TIMES", 1)
    rows = validate(RUN)
    assert [row.figure for row in rows if row.calibrated] == ["TTFT p50"]
    by_name = {(row.load, row.figure): row for row in rows}
    assert by_name["second", "TTFT p50"].simulated == pytest.approx(0.0185)
    # A step of one sequence, and nothing else: 5.1 ms.
    assert by_name["second", "TPOT p50"].simulated == pytest.approx(0.0051, rel=0.01)
    assert by_name["second", "TPOT p50"].inside
    assert by_name["second", "host"].simulated == pytest.approx(80.0)
    # Idle for more than half of the time: so much of what it makes alone.
    assert 0.2 * 2_800 < by_name["second, lending", "guest"].simulated < 2_800
    assert len(table(rows).rows) == len(rows)
    assert any("guest" in line for line in summary(rows))


def test_a_prediction_is_inside_the_spread_or_near_its_middle() -> None:
    def row(simulated: float) -> ValidationRow:
        return ValidationRow("load", "TTFT p50", (1.0, 1.3), simulated, "ms")

    assert row(1.0).inside
    assert not row(0.99).inside
    assert row(1.04).near
    assert not row(0.9).near
    assert row(1.4).off == pytest.approx(1.4 / 1.15 - 1)
    nothing = ValidationRow("load", "guest", (0.0,), 62.0, "tok/s")
    assert not nothing.near, "who predicts tokens where there were none is not near"
