"""Policies as objects in the chart: who gets a token, what it is good for, and what it reaches."""

from pathlib import Path

import pytest

from rose.main.scheduler import settings_of
from tests.unit.helm.rendering import NODES_ONLY, RELAY, Object, objects, pods

OFF: Object = {"controller": {"enabled": False}}
OTHER: Object = {"controller": {"kubeconfigSecret": "serving"}}
SCHEDULER = "Deployment/r-scheduler"


def args(*values: Object) -> list[str]:
    (container,) = pods(*values)[SCHEDULER]["containers"]
    return [arg.replace("$(POD_IP)", "10.0.0.7") for arg in container["args"]]


def test_schedulers_act_on_objects_by_a_token_of_their_own() -> None:
    settings = settings_of(args()[1:])
    assert settings.kubernetes
    assert settings.kubeconfig is None
    with_token = [k for k, pod in pods(RELAY).items() if pod["automountServiceAccountToken"]]
    assert with_token == [SCHEDULER]
    assert objects()["ServiceAccount/r-scheduler"]["automountServiceAccountToken"] is False


def test_objects_of_another_cluster_count_by_its_kubeconfig() -> None:
    settings = settings_of(args(OTHER)[1:])
    assert settings.kubeconfig == Path("/etc/rose/kubeconfig/config")
    pod = pods(OTHER)[SCHEDULER]
    assert pod["automountServiceAccountToken"] is False
    (volume,) = [each for each in pod["volumes"] if each["name"] == "kubeconfig"]
    assert volume["secret"] == {"secretName": "serving", "defaultMode": 0o440}
    assert not [key for key in objects(OTHER) if "controller" in key]


@pytest.mark.parametrize("values", [OFF, NODES_ONLY], ids=["off", "nodes"])
def test_where_nobody_acts_on_objects_nobody_has_a_token(values: Object) -> None:
    assert not [k for k, pod in pods(values).items() if pod["automountServiceAccountToken"]]
    assert not [key for key in objects(values) if "controller" in key]
    if values is OFF:
        assert not settings_of(args(values)[1:]).kubernetes


def test_the_token_reads_policies_writes_their_status_and_tells_of_changes() -> None:
    found = objects()
    assert found["ClusterRole/r-controller"]["rules"] == [
        {
            "apiGroups": ["rose.dev"],
            "resources": ["rosecapacitypolicies"],
            "verbs": ["list"],
        },
        {
            "apiGroups": ["rose.dev"],
            "resources": ["rosecapacitypolicies/status"],
            "verbs": ["patch"],
        },
    ]
    events = found["Role/r-controller-rose-system"]
    assert events["metadata"]["namespace"] == "default"
    assert events["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    for key in ("ClusterRoleBinding/r-controller", "RoleBinding/r-controller-rose-system"):
        assert found[key]["subjects"] == [
            {"kind": "ServiceAccount", "name": "r-scheduler", "namespace": "rose-system"}
        ]


def test_roles_may_be_somebody_elses_to_make() -> None:
    assert not [key for key in objects({"rbac": {"create": False}}) if "Role" in key]


def test_schedulers_reach_the_api_server_and_an_operator_may_say_where_it_is() -> None:
    def out(*values: Object) -> list[Object]:
        egress = objects(*values)["NetworkPolicy/r-scheduler"]["spec"]["egress"]
        return [rule for rule in egress if {443, 6443} <= {p["port"] for p in rule["ports"]}]

    assert [rule.keys() for rule in out()] == [{"ports"}]
    peer = {"ipBlock": {"cidr": "10.0.0.1/32"}}
    assert out({"networkPolicy": {"peers": {"apiServer": [peer]}}})[0]["to"] == [peer]
    assert out(OFF) == []
