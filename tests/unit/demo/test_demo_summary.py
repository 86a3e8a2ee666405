"""What a newcomer reads at the end of the quickstart."""

from pathlib import Path

import pytest

from bench.demo.report.report import print_quickstart, told, write_report
from tests.fakes.demo_run import StandInRun


def test_the_quickstart_tells_what_happened(tmp_path: Path) -> None:
    report = write_report(StandInRun(quickstart=True, forced_revocations=1).write(tmp_path))
    text = " ".join(told(report))
    assert f"published {report.weights.versions} versions" in text
    assert "% of its" in text
    assert "0 failed" in text
    assert "revoked once while it held turns and killed once" in text


def test_it_ends_with_the_way_to_every_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_quickstart(write_report(StandInRun(quickstart=True).write(tmp_path)), tmp_path)
    printed = capsys.readouterr().out
    assert "rose demo --accept" in printed
    assert "harvest: gain" not in printed


def test_a_run_of_which_nothing_came_is_told_too(tmp_path: Path) -> None:
    folder = StandInRun(quickstart=True).write(tmp_path)
    for name in ("turns", "trajectories", "steps", "client_requests", "host_latency"):
        (folder / f"{name}.jsonl").write_text("")
    assert "0 requests" in " ".join(told(write_report(folder)))
