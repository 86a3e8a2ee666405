"""A guest's KV memory gives way to its host's, and how fast it comes back under each policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import PressureLimits, PressurePolicy
from executor.kv.lending import PressureCore
from executor.kv.shrink_plan import NO_CAP

MS = 1_000_000
SECOND = 1_000 * MS
MOST = 64
PAPER = PressureLimits(PressurePolicy.PAPER)
ADAPTIVE = PressureLimits(PressurePolicy.ADAPTIVE)


class PressureRig:
    """Ticks of 20 ms, as a node daemon's."""

    def __init__(self, limits: PressureLimits, cap: int = NO_CAP) -> None:
        self.core = PressureCore(limits, cap)
        self.now_ns = SECOND
        self.version = 1
        self.holds = MOST
        self.caps: list[int] = []

    def run(self, used: float | None, seconds: float) -> int:
        for _ in range(round(seconds / 0.02)):
            self.now_ns += 20 * MS
            cap = self.core.step(self.now_ns, used, MOST, self.holds, self.version)
            self.holds = min(MOST, cap or MOST)
            self.caps.append(cap)
        return self.caps[-1]


@pytest.mark.parametrize("limits", [PAPER, ADAPTIVE])
def test_without_pressure_there_is_no_cap(limits: PressureLimits) -> None:
    assert PressureRig(limits).run(0.85, 5) == NO_CAP


@pytest.mark.parametrize("limits", [PAPER, ADAPTIVE])
def test_the_first_tick_above_the_watermark_halves(limits: PressureLimits) -> None:
    rig = PressureRig(limits)
    rig.run(0.5, 1)
    assert rig.run(0.9, 0.02) == MOST // 2


def test_paper_halves_once_a_crossing_and_grows_with_the_next_version() -> None:
    rig = PressureRig(PAPER)
    assert rig.run(0.95, 5) == 32
    assert rig.run(0.10, 60) == 32, "growth is frozen until the next training step"
    assert rig.run(0.95, 1) == 16, "another crossing"
    rig.version += 1
    assert rig.run(0.95, 1) == 16, "not while the pressure lasts"
    rig.run(0.10, 1)
    rig.version += 1
    assert rig.run(0.10, 0.02) == NO_CAP


def test_adaptive_halves_for_as_long_as_the_pressure_lasts() -> None:
    rig = PressureRig(ADAPTIVE)
    rig.run(0.95, 0.5)
    assert rig.caps[-1] == 8
    assert rig.run(0.95, 5) == 1, "one granule always stays"


def test_adaptive_grows_stepwise_and_does_not_wait_for_training() -> None:
    rig = PressureRig(ADAPTIVE)
    rig.run(0.95, 0.1)
    assert rig.run(0.85, 5) == 1, "between the watermarks the pressure goes on"
    assert rig.run(0.30, 60) == NO_CAP
    grown = [b - a for a, b in zip(rig.caps, rig.caps[1:], strict=False) if b > a]
    assert set(grown) == {MOST // 8}
    assert rig.caps.count(9) == 50, "a step a second"


def test_adaptive_does_not_grow_into_a_load_that_keeps_coming_back() -> None:
    """Scale-down oscillation: bursts every two seconds must not make the guest swing."""
    rig = PressureRig(ADAPTIVE)
    for _ in range(10):
        rig.run(0.95, 1.0)
        rig.run(0.30, 1.0)
    calm = rig.caps[len(rig.caps) // 2 :]
    assert max(calm) <= MOST // 4


def test_adaptive_is_large_again_between_rare_bursts() -> None:
    """Bursts of a second, eight seconds apart: a minute's memory of them must not keep it small."""
    rig = PressureRig(ADAPTIVE)
    for _ in range(12):
        rig.run(0.95, 1.0)
        rig.run(0.30, 8.0)
    settled = [cap or MOST for cap in rig.caps[len(rig.caps) // 2 :]]
    assert sum(settled) / len(settled) > MOST / 4
    assert max(settled) >= MOST * 3 // 4


@pytest.mark.parametrize("limits", [PAPER, ADAPTIVE])
def test_a_new_daemon_goes_on_with_the_cap_it_finds(limits: PressureLimits) -> None:
    rig = PressureRig(limits, cap=16)
    assert rig.run(0.85, 0.02) == 16


@pytest.mark.parametrize("limits", [PAPER, ADAPTIVE])
def test_unknown_load_changes_nothing(limits: PressureLimits) -> None:
    rig = PressureRig(limits)
    rig.run(0.95, 0.02)
    assert rig.run(None, 30) == 32


@given(
    st.sampled_from([PAPER, ADAPTIVE]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=200),
)
def test_the_cap_never_grows_under_pressure_and_stays_in_bounds(
    limits: PressureLimits, ticks: list[tuple[float, int]]
) -> None:
    core, now_ns, before = PressureCore(limits), SECOND, MOST
    for used, version in ticks:
        now_ns += 20 * MS
        cap = core.step(now_ns, used, MOST, before, version) or MOST
        assert 1 <= cap <= MOST
        if core.pressed:
            assert cap <= before
        before = cap


@pytest.mark.parametrize(
    "bad", [{"low": 0.95}, {"high": 1.2}, {"low": 0.0}, {"shrink_ns": 0}, {"grow_steps": 0}]
)
def test_limits_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"give|must"):
        PressureLimits(**bad)  # type: ignore[arg-type] # wrong on purpose
