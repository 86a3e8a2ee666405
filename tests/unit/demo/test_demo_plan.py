import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.demo.cli import DemoSettings
from bench.demo.plan import BLOCK_S, PAIRS, accept_plan, run_compare

STEPS = 60


@given(seed=st.integers(0, 1000))
def test_both_arms_of_a_pair_replay_the_same_arrivals_side_by_side(seed: int) -> None:
    plan = accept_plan(seed, STEPS)
    for pair in range(PAIRS):
        blocks = [block for block in plan if block.pair == pair]
        assert sorted(block.arm for block in blocks) == ["frozen", "leased"]
        assert blocks[0].segment == blocks[1].segment
        assert [block.seconds for block in blocks] == [BLOCK_S, BLOCK_S]
        assert blocks[1].block - blocks[0].block == 1


@given(seed=st.integers(0, 1000))
def test_as_many_pairs_begin_leased_as_frozen(seed: int) -> None:
    plan = accept_plan(seed, STEPS)
    first = {block.pair: block.arm for block in reversed(plan) if block.pair is not None}
    leased_first = sum(arm == "leased" for arm in first.values())
    assert abs(2 * leased_first - PAIRS) <= 1


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (0.05, 0), (-0.2, 1)])
def test_the_verdict_is_on_the_mean_difference(tmp_path: Path, shift: float, code: int) -> None:
    seen: list[tuple[int, str | None]] = []

    def standin_run(settings: DemoSettings) -> int:
        seen.append((settings.seed, settings.only))
        settings.out.mkdir(parents=True)
        final = 0.9 + (shift if settings.only == "leased" else 0.0)
        report = {"heldout": {"final": final}}
        (settings.out / "report.json").write_text(json.dumps(report))
        return 1

    assert run_compare(DemoSettings(out=tmp_path, compare=True), standin_run) == code
    assert seen == [(seed, arm) for seed in range(3) for arm in ("leased", "frozen")]
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["mean_difference"] == pytest.approx(shift)
