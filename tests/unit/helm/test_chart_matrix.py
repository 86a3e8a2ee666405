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
    QUOTAS,
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
WORKLOAD: Object = {
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "rl"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraArgs": ["--more=1"],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "serviceAccount": {"annotations": {"a/b": "c"}},
}
INGRESS: Object = {"enabled": True, "hosts": ["rose.example.net"], "tlsSecret": "rose-tls"}
SWITCHES: list[Object] = [
    {},
    joined(
        RELAY,
        {
            "commands": WORKLOAD,
            "gateway": {**WORKLOAD, "ingress": INGRESS},
            "scheduler": {
                **WORKLOAD,
                "dashboardTokenSecret": "dashboard",
                "dashboardIngress": INGRESS,
            },
            "global": {"imageRegistry": "mirror.example.net"},
            "monitoring": {"podMonitor": True, "prometheusRule": True, "dashboards": True},
            "node": {
                **WORKLOAD,
                "sharedFolder": {"prepare": True},
                "runFolder": "/var/lib/rose",
            },
            "rbac": {
                "operators": [{"kind": "ServiceAccount", "name": "ops"}],
                "viewers": [{"kind": "Group", "name": "auditors"}],
            },
            "imagePullSecrets": ["registry"],
            "toolbox": {"enabled": True},
            "webhook": {"enabled": True, **WORKLOAD},
            "controller": {"nodeLabels": ["pool"]},
        },
        {"store": {"own": WORKLOAD}, "relay": WORKLOAD},
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


# A trial has neither.
KEPT: Object = {"records": {"persistence": {"enabled": True}}, "backup": {"enabled": True}}


def matrix() -> list[Object]:
    whole = [joined(*each) for each in itertools.product(ROLES, MODES, IDENTITIES, SWITCHES)]
    kept = [joined(role, SWITCHES[1], KEPT) for role in ROLES]
    # Schedulers of the other cluster would count the pods.
    kept += [joined(role, mode, QUOTAS) for role in ROLES[:2] for mode in MODES]
    # Certificates of a trial are self-made, and in no secret.
    viewers = {"rbac": {"viewers": []}}
    return [*whole, TRIAL, joined(TRIAL, SWITCHES[1], viewers), SELF_MADE, *kept]


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
