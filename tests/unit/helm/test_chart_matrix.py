"""Rendered objects are what each supported Kubernetes takes, over the values that matter."""

import itertools
import json
from typing import Any

import pytest
from helm_python import lint

from tests.unit.helm.rendering import (
    ACTIVE,
    ASK,
    CERT_MANAGER,
    CHART,
    LEAST,
    RELAY,
    SECRETS,
    SELF_MADE,
    TRIAL,
    Object,
    joined,
    objects,
)

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
# Resources of other projects, whose schemas Kubernetes does not have.
OTHERS = ("cert-manager.io/", "monitoring.coreos.com/")
DRA_SINCE = "1.34"

ROLES: list[Object] = [
    {"role": "all"},
    {"role": "control"},
    {"role": "nodes", "schedulers": ["s:7400"]},
]
MODES: list[Object] = [
    {"mode": "Off"},
    {},
    *(joined(ACTIVE, {"access": way}) for way in ("dra-admin", "runtime-class", "privileged")),
]
IDENTITIES: list[Object] = [{}, SECRETS, CERT_MANAGER, ASK]
SWITCHES: list[Object] = [
    {},
    joined(
        RELAY,
        {
            "monitoring": {"podMonitor": True, "prometheusRule": True, "dashboards": True},
            "node": {"sharedFolder": {"prepare": True}, "runFolder": "/var/lib/rose"},
            "rbac": {"operators": [{"kind": "ServiceAccount", "name": "ops"}]},
            "imagePullSecrets": ["registry"],
            "toolbox": {"enabled": True},
            "controller": {"nodeLabels": ["pool"]},
        },
    ),
    {
        "crds": {"install": False},
        "rbac": {"create": False},
        "test": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudgets": False,
        "gateway": {"enabled": False},
        "node": {"priorityClass": {"create": False, "name": "low"}, "models": {"claim": "models"}},
    },
]


def matrix() -> list[Object]:
    whole = [joined(*each) for each in itertools.product(ROLES, MODES, IDENTITIES, SWITCHES)]
    return [*whole, TRIAL, joined(TRIAL, SWITCHES[1]), SELF_MADE]


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_each_kubernetes_takes_all_that_is_rendered(version: str) -> None:
    validate: Any = pytest.importorskip("kubernetes_validate", reason="brings the schemas").validate
    asked: set[str] = set()
    for values in matrix():
        for key, each in objects(values, but=()).items():
            text = json.dumps(each, sort_keys=True)
            newer = each["apiVersion"].startswith("resource.k8s.io/") or "resourceClaims" in text
            if text in asked or each["apiVersion"].startswith(OTHERS):
                continue
            if newer and VERSIONS.index(version) < VERSIONS.index(DRA_SINCE):
                continue
            asked.add(text)
            try:
                validate(each, version, strict=True)
            except Exception as error:
                pytest.fail(f"{version}: {key}: {error}")
    assert len(asked) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_the_chart_lints_for_each_kubernetes(version: str) -> None:
    for values in matrix():
        result = lint(str(CHART), joined(LEAST, values), strict=True, kube_version=f"v{version}.0")
        assert not result["errors"], result["errors"]
