"""The chart lints with Helm's own code and refuses values that mean nothing."""

from pathlib import Path

import pytest
from helm_python import Chart, HelmError, lint

INFO = 1
CHART = Path(__file__).parents[3] / "helm" / "rose"


def test_chart_lints_without_a_word() -> None:
    result = lint(str(CHART), strict=True)
    assert not result["errors"]
    assert not [message for message in result["messages"] if message["severity"] > INFO]


def test_nothing_is_lent_by_default() -> None:
    chart = Chart.load(str(CHART))
    assert chart.values["harvest"]["mode"] == "OFF"
    rendered = str(chart.render())
    assert "--harvest=OFF" in rendered


def test_unknown_harvest_mode_is_refused() -> None:
    chart = Chart.load(str(CHART))
    with pytest.raises(HelmError, match="harvest"):
        chart.render(values={"harvest": {"mode": "SOMETIMES"}})
