"""Operators' files of this tree: metrics reference, rules, dashboards and runbooks."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests.harness.programs.prometheus import asked_by

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "helm" / "rose" / "files" / "rules" / "rose.rules.yaml"
RULE_TESTS = ROOT / "tests" / "rules" / "rose.rules.test.yaml"
DASHBOARDS = ROOT / "helm" / "rose" / "files" / "dashboards"
RUNBOOKS = ROOT / "docs" / "operators" / "runbooks"

# Prometheus' own: of every target, as the chart labels it, of histograms' buckets, and of alerts.
TARGET_LABELS = {"cluster", "node", "instance", "le"}
RECORDED_LABELS = {"cluster", "node", "instance", "host"}
ALERT_LABELS = {"alertname", "alertstate", "burnrate_tier", "severity"}


@cache
def script(name: str) -> ModuleType:
    """A script of `scripts`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def known_labels() -> dict[str, frozenset[str]]:
    """Labels by each name that a query may ask for, of all processes."""
    labels: dict[str, frozenset[str]] = {}
    for family in script("metrics_reference").families():
        for name in family.names:
            labels[name] = labels.get(name, frozenset()) | family.labels
    return labels


@cache
def rules() -> list[dict[str, Any]]:
    """All rules of all groups, in their order."""
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def complaints(expression: str) -> list[str]:
    """Names in an expression that no process and no rule has."""
    asked = asked_by(expression)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known, found = known_labels(), []
    grouped_by = set(TARGET_LABELS)
    for name, labels in asked.metrics.items():
        if name in recorded:
            grouped_by |= RECORDED_LABELS
            found += [f"{name} has no label {label}" for label in labels - RECORDED_LABELS]
        elif name == "ALERTS":
            grouped_by |= ALERT_LABELS
        elif name not in known:
            found.append(f"there is no metric {name}")
        else:
            grouped_by |= known[name]
            extra = labels - known[name] - TARGET_LABELS
            found += [f"{name} has no label {label}" for label in extra]
    return found + [f"nothing here has a label {label}" for label in asked.grouped - grouped_by]
