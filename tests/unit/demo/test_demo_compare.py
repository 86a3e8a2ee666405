"""Paired seeds, each with and without the guest."""

import json
from pathlib import Path

import pytest

from bench.demo.cli import DemoSettings
from bench.demo.plan import run_compare


def _settings(out: Path) -> DemoSettings:
    return DemoSettings(out=out, compare=True)


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

    assert run_compare(_settings(tmp_path), standin_run) == code
    assert seen == [(seed, arm) for seed in range(3) for arm in ("leased", "frozen")]
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["mean_difference"] == pytest.approx(shift)
