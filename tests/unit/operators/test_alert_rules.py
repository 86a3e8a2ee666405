"""Alert rules ask for metrics that exist, and say what happened, how bad it is, and what to do."""

import re
from typing import Any

import pytest
from operator_files import ROOT, RULE_TESTS, alerts, complaints, rules

from elastic_scheduler.capacity.policy import SloBudget
from executor.freeze_reason import FreezeReason
from rose.security.certificates import WARN_BEFORE_S
from slo import RULES
from slo.error_budget import DAY_S

ALERTS = [pytest.param(rule, id=rule["alert"]) for rule in alerts()]


def named(name: str) -> dict[str, Any]:
    return next(rule for rule in alerts() if rule["alert"] == name)


@pytest.mark.parametrize("rule", [pytest.param(r, id=r.get("alert", "record")) for r in rules()])
def test_every_metric_and_label_exists(rule: dict[str, Any]) -> None:
    assert complaints(rule["expr"]) == []


@pytest.mark.parametrize("rule", ALERTS)
def test_an_alert_says_what_is_wrong_with_its_values_and_where_to_read_on(
    rule: dict[str, Any],
) -> None:
    said = rule["annotations"]
    assert set(said) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("page", "ticket", "info")
    page = ROOT / said["runbook_url"]
    assert page.name == f"{rule['alert']}.md"
    assert page.is_file()
    values = re.findall(r"{{ (?:or )?\$(?:value|labels\.\w+)", said["description"])
    assert values or rule["alert"] == "RoseSchedulerNoLeader", "a description shows its values"


@pytest.mark.parametrize("rule", ALERTS)
def test_an_alert_is_tested_to_fire_and_not_to(rule: dict[str, Any]) -> None:
    # Each query there names all that fire, beside series that must not.
    text = RULE_TESTS.read_text(encoding="utf-8")
    assert re.search(rf"alertname(=~?\"[^\"]*|: ){rule['alert']}\b", text)
    assert len({each["alert"] for each in alerts()}) == len(alerts())


def test_burn_rates_are_those_that_hold_hosts_back() -> None:
    """The scheduler holds a node by the same rules: an alert without a hold would be a riddle."""
    allowed = 1 - SloBudget().objective
    assert allowed == pytest.approx(0.01)
    found = {"page": named("RoseHostBudgetBurnFast"), "ticket": named("RoseHostBudgetBurnSlow")}
    for rule in RULES:
        expression = " ".join(found[rule.severity]["expr"].split())
        threshold = rule.threshold(30 * DAY_S)
        factor = "0.01" if threshold == 1 else f"{threshold:g} * 0.01"
        for window_s in (rule.long_s, rule.short_s):
            window = f"{window_s / DAY_S:g}d" if window_s >= DAY_S else f"{window_s / 3600:g}h"
            window = window if window_s >= 3600 else f"{window_s / 60:g}m"
            assert f"ratio_rate{window} >= {factor}" in expression
    floor = f">= {SloBudget().min_bad}"
    assert all(rule["expr"].count(floor) == 2 for rule in found.values())


def test_reasons_and_times_are_those_of_the_product() -> None:
    found = re.search(r'reason=~"([^"]+)"', named("RoseHostSilent")["expr"])
    assert found
    assert set(found[1].split("|")) <= {str(reason) for reason in FreezeReason}
    assert f"< {WARN_BEFORE_S:.0f}" in named("RoseCertificateExpiring")["expr"]
