"""Options that every workload takes reach each pod, by one template."""

import json
import re
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from rose.logs.process_log import OPTIONS as LOG_OPTIONS
from scripts.chart_values import ControlWorkload, Workload
from tests.unit.helm.rendering import (
    ASK,
    CERT_MANAGER,
    CHART,
    DIGEST,
    LEAST,
    RELAY,
    Object,
    chart,
    containers,
    joined,
    objects,
    pod_labels,
    pod_of,
    pods,
)

# Keys of the values, with the workloads that they make.
WORKLOADS: dict[str, tuple[str, ...]] = {
    "scheduler": ("Deployment/r-scheduler",),
    "gateway": ("Deployment/r-gateway",),
    "relay": ("Deployment/r-relay",),
    "node": ("DaemonSet/r-node",),
    "store.own": ("StatefulSet/r-etcd",),
    "tls.signer": ("Deployment/r-signer",),
    "webhook": ("Deployment/r-webhook",),
    "commands": (
        "Job/r-policy",
        "CronJob/r-stop-all",
        "CronJob/r-resume",
        "CronJob/r-backup",
        "Pod/r-test-hold",
        "Deployment/r-toolbox",
    ),
}
SWITCHED: Object = {key: {"enabled": True} for key in ("backup", "toolbox", "webhook")}
ALL = joined(RELAY, ASK, SWITCHED)
SCRIPTS = ("Pod/r-test-hold", "Deployment/r-toolbox", "CronJob/r-backup")
TOLERATION = {"key": "gpu", "operator": "Exists", "tolerationSeconds": 300}
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}
SPREAD = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
ENV = [
    {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
]
VOLUME = {"name": "more", "configMap": {"name": "more"}}
MOUNT = {"name": "more", "mountPath": "/more"}


def given(workload: str, option: Object) -> Object:
    for key in reversed(workload.split(".")):
        option = {key: option}
    return option


def own(pod: Object) -> Object:
    """Return the container that is the workload's own."""
    return pod["containers"][0]  # type: ignore[no-any-return]


# An option, its value, and what a workload's object then has.
OPTIONS: list[tuple[str, Any, Any]] = [
    ("nodeSelector", {"pool": "a"}, lambda _, pod: pod["nodeSelector"]["pool"] == "a"),
    ("tolerations", [TOLERATION], lambda _, pod: pod["tolerations"] == [TOLERATION]),
    ("affinity", AFFINITY, lambda _, pod: pod["affinity"] == AFFINITY),
    ("priorityClassName", "high", lambda _, pod: pod["priorityClassName"] == "high"),
    (
        "topologySpreadConstraints",
        [SPREAD],
        lambda _, pod: pod["topologySpreadConstraints"] == [SPREAD],
    ),
    ("topologySpreadConstraints", [], lambda _, pod: "topologySpreadConstraints" not in pod),
    ("podAnnotations", {"a/b": "c"}, lambda each, _: annotations(each)["a/b"] == "c"),
    (
        "podLabels",
        {"team": "rl", "app.kubernetes.io/name": "other"},
        lambda each, _: (
            (pod_labels(each)["team"], pod_labels(each)["app.kubernetes.io/name"]) == ("rl", "rose")
        ),
    ),
    ("extraEnv", ENV, lambda _, pod: own(pod)["env"][-2:] == ENV),
    ("extraArgs", ["--more=1"], lambda _, pod: "--more=1" in own(pod)["args"]),
    ("extraVolumes", [VOLUME], lambda _, pod: VOLUME in pod["volumes"]),
    ("extraVolumeMounts", [MOUNT], lambda _, pod: MOUNT in own(pod)["volumeMounts"]),
]


def annotations(each: Object) -> Object:
    if each["kind"] == "Pod":
        return each["metadata"]["annotations"]  # type: ignore[no-any-return]
    spec = each["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else each["spec"]
    return spec["template"]["metadata"]["annotations"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    ("option", "value", "has"), OPTIONS, ids=[f"{o}={json.dumps(v)}" for o, v, _ in OPTIONS]
)
def test_each_option_reaches_each_pod_of_its_workload_and_no_other(
    workload: str, option: str, value: object, has: Any
) -> None:
    if workload == "node" and option in ("priorityClassName", "topologySpreadConstraints"):
        with pytest.raises(HelmError, match=option):
            chart().render(values=joined(LEAST, given(workload, {option: value})))
        return
    before = objects(ALL)
    after = objects(ALL, given(workload, {option: value}))
    for key in WORKLOADS[workload]:
        if option == "extraArgs" and key in SCRIPTS:
            continue
        assert has(after[key], pod_of(after[key])), key
    changed = {key for key in after if after[key] != before[key] and pod_of(after[key])}
    assert changed <= set(WORKLOADS[workload])


def test_the_table_has_every_option_and_every_workload() -> None:
    fields = {field.alias for field in ControlWorkload.model_fields.values()}
    assert fields == {option for option, _, _ in OPTIONS} | {"serviceAccount"}
    assert set(Workload.model_fields) < set(ControlWorkload.model_fields)
    assert set(pods(ALL)) == {key for keys in WORKLOADS.values() for key in keys}


def test_a_service_account_has_its_annotations() -> None:
    for workload, keys in WORKLOADS.items():
        values = given(workload, {"serviceAccount": {"annotations": {"iam/role": "r"}}})
        found = objects(ALL, values)
        names = {f"ServiceAccount/{pods(ALL)[key]['serviceAccountName']}" for key in keys}
        for key, each in found.items():
            if key.startswith("ServiceAccount/"):
                has = "annotations" in each["metadata"]
                assert has is (key in names), (workload, key)


@pytest.mark.parametrize(
    ("registry", "repository", "image"),
    [
        ("", "registry.k8s.io/etcd", "registry.k8s.io/etcd"),
        ("mirror.example/a", "registry.k8s.io/etcd", "mirror.example/a/etcd"),
        ("mirror.example/", "localhost:5000/team/etcd", "mirror.example/team/etcd"),
        ("mirror.example", "team/etcd", "mirror.example/team/etcd"),
        ("mirror.example", "etcd", "mirror.example/etcd"),
    ],
)
def test_one_registry_may_stand_for_all(registry: str, repository: str, image: str) -> None:
    values = {
        "global": {"imageRegistry": registry},
        "images": {"etcd": {"repository": repository}},
    }
    found = pods(values)
    assert found["StatefulSet/r-etcd"]["containers"][0]["image"] == f"{image}@{DIGEST}"
    if registry:
        images = [c["image"] for pod in found.values() for c in containers(pod)]
        assert all(each.startswith("mirror.example/") for each in images)


def test_pull_secrets_are_given_as_other_charts_take_them() -> None:
    values = {
        "global": {"imagePullSecrets": [{"name": "g"}]},
        "imagePullSecrets": ["a", {"name": "b"}],
    }
    for key, pod in pods(ALL, values).items():
        assert pod["imagePullSecrets"] == [{"name": "g"}, {"name": "a"}, {"name": "b"}], key


def test_global_may_be_taken_away() -> None:
    assert pods({"global": None}) == pods()


@pytest.mark.parametrize(
    ("values", "name", "label"),
    [
        ({}, "r", "rose"),
        ({"nameOverride": "lend"}, "r-lend", "lend"),
        ({"nameOverride": "r"}, "r", "r"),
        ({"nameOverride": "lend", "fullnameOverride": "whole"}, "whole", "lend"),
    ],
    ids=json.dumps,
)
def test_names_may_be_others(values: Object, name: str, label: str) -> None:
    found = objects(CERT_MANAGER, ALL, values)
    for key, each in found.items():
        if not key.startswith(("RoleBinding/", "Role/")):
            assert each["metadata"]["name"].startswith(name), key
        if (pod := pod_of(each)) is not None:
            assert pod_labels(each)["app.kubernetes.io/name"] == label
            assert pod["serviceAccountName"].startswith(f"{name}-")
    text = json.dumps(found)
    assert text.count('"app.kubernetes.io/name"') == text.count(
        f'"app.kubernetes.io/name": "{label}"'
    )


INGRESS = {"enabled": True, "hosts": ["x.example.net"], "className": "nginx", "tlsSecret": "x-tls"}


@pytest.mark.parametrize(
    ("values", "level", "form"),
    [({}, "info", "json"), ({"logLevel": "debug", "logFormat": "text"}, "debug", "text")],
)
def test_processes_log_as_the_values_say(values: Object, level: str, form: str) -> None:
    for key, pod in pods(ALL, values).items():
        env = {each["name"]: each.get("value") for each in own(pod)["env"]}
        # Commands write answers to standard output, and nothing else.
        silent = (*WORKLOADS["commands"], *WORKLOADS["tls.signer"], *WORKLOADS["webhook"])
        logs = "etcd" not in key and key not in silent
        assert level in LOG_OPTIONS["level"][1]
        assert form in LOG_OPTIONS["format"][1]
        has = (env.get("ROSE_LOG_LEVEL"), env.get("ROSE_LOG_FORMAT"))
        assert has == ((level, form) if logs else (None, None)), key


def test_the_readmes_values_are_values() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.S)
    assert chart().render(values=joined(LEAST, yaml.safe_load(text)))


FACES: list[tuple[Object, str, str]] = [
    ({"gateway": {"ingress": INGRESS}}, "r-gateway", "http"),
    (
        {"scheduler": {"dashboardTokenSecret": "t", "dashboardIngress": INGRESS}},
        "r-leader",
        "dashboard",
    ),
]


@pytest.mark.parametrize(("values", "name", "port"), FACES, ids=["gateway", "dashboard"])
def test_an_ingress_leads_to_a_port_that_is_there(values: Object, name: str, port: str) -> None:
    assert not [key for key in objects() if key.startswith("Ingress/")]
    found = objects(values)
    spec = found[f"Ingress/{name}"]["spec"]
    assert (spec["ingressClassName"], spec["tls"]) == (
        "nginx",
        [{"secretName": "x-tls", "hosts": ["x.example.net"]}],
    )
    (rule,) = spec["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend) == ("x.example.net", {"name": name, "port": {"name": port}})
    (served,) = [p for p in found[f"Service/{name}"]["spec"]["ports"] if p["name"] == port]
    selector = dict(found[f"Service/{name}"]["spec"]["selector"])
    selector.pop("rose.dev/leader", None)  # The leader marks its pod by itself.
    (workload,) = [
        pod
        for key, each in found.items()
        if (pod := pod_of(each)) and selector.items() <= pod_labels(each).items()
    ]
    ports = own(workload)["ports"]
    assert served["targetPort"] in [p[key] for p in ports for key in ("name", "containerPort")]


def test_a_dashboard_beyond_loopback_asks_for_its_token() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "oauth2-proxy"}}}]
    values = {
        "scheduler": {"dashboardTokenSecret": "t"},
        "networkPolicy": {"peers": {"dashboard": peers}},
    }
    found = objects(values)
    pod = pods(values)["Deployment/r-scheduler"]
    args = pod["containers"][0]["args"]
    assert "--dashboard-host=0.0.0.0" in args
    assert "--dashboard-token-file=/etc/rose/dashboard/token" in args
    (volume,) = [v for v in pod["volumes"] if v["name"] == "dashboard"]
    assert volume["secret"]["secretName"] == "t"
    let_in = found["NetworkPolicy/r-scheduler"]["spec"]["ingress"]
    assert {"from": peers, "ports": [{"protocol": "TCP", "port": 7480}]} in let_in
    assert not any("dashboard-host" in arg for arg in own(pods()["Deployment/r-scheduler"])["args"])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"scheduler": {"dashboardIngress": INGRESS}}, "give scheduler.dashboardTokenSecret"),
        (
            {"scheduler": {"dashboardPort": None, "dashboardTokenSecret": "t"}},
            "give scheduler.dashboardPort",
        ),
        (
            {
                "scheduler": {"dashboardTokenSecret": "t", "dashboardIngress": INGRESS},
                "controller": {"enabled": False},
            },
            "set controller.enabled=true",
        ),
        ({"gateway": {"ingress": {"enabled": True}}}, "give its hosts"),
        ({"gateway": {"extraEnv": [{"nam": "x"}]}}, "name"),
        ({"gateway": {"nodeSelecter": {}}}, "nodeSelecter"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(values: Object, sentence: str) -> None:
    with pytest.raises(HelmError, match=sentence):
        chart().render(values=joined(LEAST, values))
