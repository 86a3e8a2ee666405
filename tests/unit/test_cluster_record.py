"""The record of a run on a real API server: what was not tried is not good."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts.cluster_tests import summary

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="1.5" />
<testcase classname="tests.a" name="two" time="0.25">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("inside", "kind"),
    [("", ""), ("<skipped/>", "skipped"), ("<failure/>", "failure"), ("<error/>", "error")],
)
def test_a_run_is_good_when_every_test_was_tried_and_passed(
    tmp_path: Path, inside: str, kind: str
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(inside))
    found = summary(report, "v1.36.4", "abc", datetime(2026, 11, 23, tzinfo=UTC))
    assert found["good"] == (not kind)
    assert found["not_passed"] == ({"tests.a::two": kind} if kind else {})
    assert sum(found["tests"].values()) == 2
    assert (found["seconds"], found["at"]) == (1.8, "2026-11-23T00:00:00+00:00")


def test_a_run_without_tests_is_none(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text("<testsuites/>")
    assert not summary(report, "", "", datetime.now(UTC))["good"]
