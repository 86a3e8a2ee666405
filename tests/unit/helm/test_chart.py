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
    rendered = str(chart.render(values={"insecure": True}))
    assert "--harvest=OFF" in rendered


def test_unknown_harvest_mode_is_refused() -> None:
    chart = Chart.load(str(CHART))
    with pytest.raises(HelmError, match="harvest"):
        chart.render(values={"insecure": True, "harvest": {"mode": "SOMETIMES"}})


def test_an_open_port_is_not_installed_by_mistake() -> None:
    chart = Chart.load(str(CHART))
    with pytest.raises(HelmError, match="insecure=true"):
        chart.render()


def test_certificates_make_a_port_that_asks() -> None:
    chart = Chart.load(str(CHART))
    rendered = str(chart.render(values={"tls": {"secretName": "rose-scheduler-tls"}}))
    assert "--certificate=/etc/rose/tls/tls.crt" in rendered
    assert "secretName: rose-scheduler-tls" in rendered
    assert "--insecure" not in rendered


def test_only_members_reach_the_scheduler() -> None:
    rendered = str(Chart.load(str(CHART)).render(values={"insecure": True}))
    assert "--insecure" in rendered
    assert "NetworkPolicy" in rendered
    assert "rose.dev/member" in rendered
    without = {"insecure": True, "networkPolicy": {"enabled": False}}
    assert "NetworkPolicy" not in str(Chart.load(str(CHART)).render(values=without))


def test_what_the_scheduler_must_not_forget_outlives_its_pod() -> None:
    chart = Chart.load(str(CHART))
    rendered = str(chart.render(values={"insecure": True}))
    assert "PersistentVolumeClaim" in rendered
    assert "storage: 1Gi" in rendered
    assert "storageClassName" not in rendered
    given = {"insecure": True, "scheduler": {"store": {"size": "2Gi", "storageClass": "fast"}}}
    assert "storageClassName: fast" in str(chart.render(values=given))
    with pytest.raises(HelmError, match="size"):
        chart.render(values={"insecure": True, "scheduler": {"store": {"size": "much"}}})
