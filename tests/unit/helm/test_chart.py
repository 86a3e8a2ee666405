"""The chart installs what it says, with no more than that needs, and lends nothing unasked."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from helm_python import Chart, lint

from elastic_scheduler.capacity import PolicyMode, parse_policy
from rose.controller.host_webhook import LABEL
from rose.controller.host_webhook import PATH as HOOK_PATH
from rose.security.roles import Identity, Role, server_name
from tests.unit.helm.rendering import (
    ACTIVE,
    ASK,
    CERT_MANAGER,
    CHART,
    DIGEST,
    LEAST,
    NODES_ONLY,
    RELAY,
    SECRETS,
    SELF_MADE,
    TRIAL,
    WEBHOOK,
    Object,
    chart,
    containers,
    joined,
    node_container,
    node_file,
    node_pod,
    notes,
    objects,
    pod_labels,
    pods,
    texts,
)

INFO = 1
ALL: tuple[Object, ...] = (
    {},
    joined(ACTIVE, RELAY, SECRETS),
    joined(ACTIVE, RELAY, CERT_MANAGER, WEBHOOK, {"node": {"sharedFolder": {"prepare": True}}}),
    joined(NODES_ONLY, SECRETS),
    {"role": "control"},
    joined(TRIAL, {"images": {"control": {"digest": DIGEST}}}),
    joined(SELF_MADE, RELAY, WEBHOOK),
    ASK,
    {"records": {"persistence": {"enabled": True}}, "backup": {"enabled": True}},
)
NAMES = (
    "least",
    "secrets",
    "cert-manager",
    "nodes",
    "control",
    "trial",
    "self-made",
    "ask",
    "kept",
)


# ---- lint, defaults ----


@pytest.mark.parametrize("values", ALL, ids=NAMES)
def test_chart_lints_without_a_word(values: Object) -> None:
    result = lint(str(CHART), joined(LEAST, values), strict=True)
    assert not result["errors"]
    assert not [message for message in result["messages"] if message["severity"] > INFO]


def test_nothing_is_lent_by_default() -> None:
    assert chart().values["mode"] == "Advisory"
    policy = parse_policy(objects()["ConfigMap/r-policy"]["data"]["policy.json"])
    assert policy.mode is PolicyMode.ADVISORY


# ---- Advisory asks for nothing ----


@pytest.mark.parametrize("mode", ["Off", "Advisory"])
@pytest.mark.parametrize("access", ["auto", "dra-admin", "runtime-class", "privileged"])
def test_no_gpu_is_requested_unless_active(mode: str, access: str) -> None:
    values = joined(ACTIVE, {"mode": mode, "access": access})
    assert not [key for key in objects(values) if key.startswith("ResourceClaim")]
    pod = node_pod(values)
    assert "resourceClaims" not in pod
    assert "runtimeClassName" not in pod
    container = node_container(values)
    assert "claims" not in container["resources"]
    assert "privileged" not in container["securityContext"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "nvidia.com/gpu" not in json.dumps(pod)


def test_a_node_that_only_advises_has_no_replicas_and_looks_for_no_card() -> None:
    config = node_file(ACTIVE, {"mode": "Advisory"})
    assert config["replicas"] == []
    for gpus in ({"device": 0}, {"devices": [0, 1]}):
        named = {"node": {"config": {"host": {"page": "/run/rose/page"} | gpus}}}
        assert not node_file(ACTIVE, named, {"mode": "Advisory"})["host"].keys() & gpus.keys()


def test_a_node_that_only_advises_is_small() -> None:
    assert node_container()["resources"]["limits"] == {"memory": "1Gi"}
    assert node_container(ACTIVE)["resources"]["limits"] == {"memory": "64Gi"}


# ---- access to GPUs ----


def test_dra_opens_all_gpus_without_taking_one_from_a_host() -> None:
    values = joined(ACTIVE, {"access": "dra-admin"})
    claim = objects(values)["ResourceClaimTemplate/r-node"]
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["adminAccess"] is True
    assert request["exactly"]["allocationMode"] == "All"
    assert node_container(values)["resources"]["claims"] == [{"name": "gpus"}]
    assert "privileged" not in node_container(values)["securityContext"]
    assert "admin-access=true" in notes(values)


def test_the_runtime_class_opens_them_where_there_is_no_dra() -> None:
    values = joined(ACTIVE, {"access": "runtime-class"})
    assert node_pod(values)["runtimeClassName"] == "nvidia"
    env = {each["name"]: each.get("value") for each in node_container(values)["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert not [key for key in objects(values) if key.startswith("ResourceClaim")]


def test_privileged_is_only_what_is_asked_for_by_name() -> None:
    for access in ("auto", "dra-admin", "runtime-class"):
        for pod in pods(ACTIVE, {"access": access}).values():
            assert "privileged" not in json.dumps(pod)
    context = node_container(ACTIVE, {"access": "privileged"})["securityContext"]
    assert context == {"privileged": True, "readOnlyRootFilesystem": True}


def test_auto_goes_by_what_the_cluster_serves() -> None:
    # Helm's own list, offline: of the newest Kubernetes.
    assert "ResourceClaimTemplate/r-node" in objects(ACTIVE)
    assert "by dra-admin" in notes(ACTIVE)


def test_active_runs_the_image_with_the_engine() -> None:
    values = joined(ACTIVE, {"images": {"node": {"repository": "engine"}}})
    assert node_container(values)["image"] == f"engine@{DIGEST}"
    assert node_container(values, {"mode": "Advisory"})["image"] == f"rose@{DIGEST}"


# ---- roles ----


def test_all_of_it_by_default() -> None:
    assert set(pods()) == {
        "DaemonSet/r-node",
        "Deployment/r-scheduler",
        "Deployment/r-gateway",
        "StatefulSet/r-etcd",
        "Job/r-policy",
        "CronJob/r-stop-all",
        "CronJob/r-resume",
        "Pod/r-test-hold",
    }


def test_control_has_no_nodes() -> None:
    found = pods({"role": "control"})
    assert "DaemonSet/r-node" not in found
    assert "Deployment/r-scheduler" in found
    assert "PriorityClass/r-guest" not in objects({"role": "control"})


def test_nodes_join_the_scheduler_of_another_cluster() -> None:
    assert set(pods(NODES_ONLY)) == {"DaemonSet/r-node"}
    assert node_file(NODES_ONLY)["scheduler"] == "s0.example.net:7400,s1.example.net:7400"
    egress = objects(NODES_ONLY)["NetworkPolicy/r-node"]["spec"]["egress"]
    assert [port["port"] for port in egress[-1]["ports"]] == [7400, 7400]
    assert "rose stop-all` there" in notes(NODES_ONLY)


def test_a_relay_may_stand_beside_nodes() -> None:
    values = joined(NODES_ONLY, RELAY)
    assert set(pods(values)) == {"DaemonSet/r-node", "Deployment/r-relay"}
    assert "PersistentVolumeClaim/r-relay" in objects(values)
    assert objects(values)["Deployment/r-relay"]["spec"]["strategy"] == {"type": "Recreate"}


def test_schedulers_are_several_and_spread() -> None:
    scheduler = objects()["Deployment/r-scheduler"]["spec"]
    assert scheduler["replicas"] == 2
    keys = [
        each["topologyKey"] for each in scheduler["template"]["spec"]["topologySpreadConstraints"]
    ]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_an_etcd_that_is_there_is_used_and_none_is_run() -> None:
    values = {
        "images": {"etcd": {"digest": ""}},
        "store": {
            "own": {"enabled": False},
            "endpoints": ["e1:2379", "e2:2379"],
            "user": "rose",
            "passwordSecret": "etcd-password",
            "tlsSecret": "etcd-client",
        },
    }
    assert "StatefulSet/r-etcd" not in objects(values)
    args = pods(values)["Deployment/r-scheduler"]["containers"][0]["args"]
    assert "--store=etcd://e1:2379,e2:2379/rose" in args
    assert "--store-password-file=/etc/rose/store-password/password" in args
    ports = objects(values)["NetworkPolicy/r-scheduler"]["spec"]["egress"][-1]["ports"]
    assert ports == [{"protocol": "TCP", "port": 2379}] * 2


def test_members_of_the_own_etcd_know_each_other() -> None:
    (etcd,) = pods()["StatefulSet/r-etcd"]["containers"]
    (cluster,) = [a for a in etcd["args"] if a.startswith("--initial-cluster=")]
    assert cluster.count("http://r-etcd-") == 3
    assert "http://r-etcd-2.r-etcd.rose-system.svc:2380" in cluster
    spec = objects()["StatefulSet/r-etcd"]["spec"]
    assert spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "8Gi"


# ---- identities ----


def test_own_secrets_are_mounted_by_role() -> None:
    for role in ("scheduler", "gateway"):
        volumes = {v["name"]: v for v in pods(SECRETS)[f"Deployment/r-{role}"]["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == f"own-{role}"


def test_a_nodes_container_sees_its_own_key_alone() -> None:
    for values in (SECRETS, CERT_MANAGER):
        pod = node_pod(values)
        seen = [m["name"] for m in node_container(values)["volumeMounts"]]
        assert "tls" in seen
        assert "certificates" not in seen
        (keeper,) = [
            c for c in containers(pod) if "certificates" in [m["name"] for m in c["volumeMounts"]]
        ]
        assert keeper["name"] == "identity"
        assert keeper["restartPolicy"] == "Always"


VIEWERS = [{"kind": "Group", "name": "auditors"}]


def test_cert_manager_writes_what_the_code_reads() -> None:
    """URI and DNS name as rose/security/roles.py parses them."""
    made = objects(CERT_MANAGER, RELAY, {"rbac": {"viewers": VIEWERS}})
    found = [each for key, each in made.items() if key.startswith("Certificate/")]
    roles = []
    for each in found:
        (uri,) = each["spec"]["uris"]
        owner = Identity.parse(uri)
        roles.append(owner.role)
        assert owner.cluster == "rose"
        assert each["spec"]["dnsNames"][0] == server_name(owner.role, "rose")
        assert set(each["spec"]["usages"]) >= {"server auth", "client auth"}
    assert sorted(roles) == sorted(
        [Role.SCHEDULER, Role.GATEWAY, Role.OPERATOR, Role.VIEWER, Role.RELAY, Role.NODE, Role.NODE]
    )


def test_each_wanted_secret_is_written_by_cert_manager() -> None:
    values = joined(CERT_MANAGER, RELAY)
    written = {
        each["spec"]["secretName"]
        for key, each in objects(values).items()
        if key.startswith("Certificate/")
    }
    wanted = set()
    for pod in pods(values).values():
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                wanted.add(volume["secret"]["secretName"])
            for source in volume.get("projected", {}).get("sources", []):
                wanted.add(source["secret"]["name"])
    assert wanted == written


# ---- the webhook ----


def hook_of(*values: Object) -> tuple[Object, Object]:
    """The webhook, and its configuration's metadata."""
    (found,) = [each for key, each in objects(*values).items() if key.startswith("MutatingWebhook")]
    (hook,) = found["webhooks"]
    return hook, found["metadata"]


def test_the_webhook_is_off_and_of_clusters_with_nodes() -> None:
    for values in ({}, ACTIVE, joined(WEBHOOK, {"role": "control"})):
        assert not [key for key in objects(values) if "webhook" in key.lower()]
    assert hook_of(WEBHOOK, NODES_ONLY)


def test_the_webhook_changes_labelled_pods_alone_and_stands_in_no_pods_way() -> None:
    hook, _ = hook_of(WEBHOOK)
    assert hook["objectSelector"] == {"matchLabels": {LABEL: "enabled"}}
    # Elsewhere the API server would refuse the pod for the volume that it got.
    (admits,) = hook["namespaceSelector"]["matchExpressions"]
    assert (admits["operator"], admits["values"]) == ("NotIn", ["baseline", "restricted"])
    said = [hook[key] for key in ("failurePolicy", "sideEffects", "matchPolicy", "timeoutSeconds")]
    assert said == ["Ignore", "None", "Equivalent", 5]
    (rule,) = hook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])
    assert hook["clientConfig"]["service"]["path"] == HOOK_PATH


def test_the_api_server_trusts_the_certificate_that_the_webhook_shows() -> None:
    """Made by the chart: the CA of the configuration signed the secret's certificate."""
    found = objects(WEBHOOK)
    hook, _ = hook_of(WEBHOOK)
    data = found["Secret/r-webhook-tls"]["data"]
    assert hook["clientConfig"]["caBundle"] == data["ca.crt"]
    ca, leaf = (
        x509.load_pem_x509_certificate(base64.b64decode(data[key])) for key in ("ca.crt", "tls.crt")
    )
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["r-webhook.rose-system.svc"]


def test_cert_manager_writes_the_webhooks_certificate_and_tells_the_api_server() -> None:
    hook, metadata = hook_of(WEBHOOK, CERT_MANAGER)
    assert "caBundle" not in hook["clientConfig"]
    injected = {"cert-manager.io/inject-ca-from": "rose-system/r-webhook"}
    assert metadata["annotations"] == injected
    spec = objects(WEBHOOK, CERT_MANAGER)["Certificate/r-webhook"]["spec"]
    assert spec["dnsNames"] == ["r-webhook.rose-system.svc"]
    # Without a role, and of a server alone, it opens nothing in ROSE.
    assert "uris" not in spec
    assert "client auth" not in spec["usages"]


# ---- what containers may do ----


CONTAINERS = [
    pytest.param(pod, container, id=f"{name}-{key}-{container['name']}")
    for name, values in zip(NAMES, ALL, strict=True)
    for key, pod in pods(values).items()
    for container in containers(pod)
]


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_containers_may_do_nothing_that_they_need_not(pod: Object, container: Object) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    if container["name"] == "shared-folder":
        # The one exception, which the template argues: root, for the owner of one folder.
        assert context["capabilities"]["add"] == ["CHOWN", "FOWNER", "FSETID"]
        assert [m["name"] for m in container["volumeMounts"]] == ["shared"]
    else:
        assert "add" not in context["capabilities"]
        assert context.get("runAsUser", pod["securityContext"]["runAsUser"]) > 10_000
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # A pod that asks the API server has a token; test_chart_commands.py has which that is.
    asks = pod["serviceAccountName"] in ("r-scheduler", "r-signer")
    assert pod["automountServiceAccountToken"] is asks
    assert "@sha256:" in container["image"]
    assert container["resources"]["limits"]["memory"]
    for each in ("hostNetwork", "hostPID", "hostIPC"):
        assert each not in pod


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_a_containers_words_and_probes_are_its_own(pod: Object, container: Object) -> None:
    command = container.get("command", [])
    if command[:1] == ["/bin/sh"]:
        done = subprocess.run(["/bin/sh", "-n", "-c", command[2]], capture_output=True)
        assert not done.stderr
    known = {each["name"] for each in container.get("env", [])}
    for arg in container.get("args", []):
        # Only a shell would expand others.
        assert set(re.findall(r"(?<!\$)\$\((\w+)\)", arg)) <= known
    ports = {port["name"] for port in container.get("ports", [])}
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        asked = container.get(probe, {})
        how = asked.get("httpGet") or asked.get("tcpSocket")
        assert how is None or how["port"] in ports


@pytest.mark.parametrize("values", ALL, ids=NAMES)
def test_every_object_says_whose_it_is_and_every_pod_has_what_it_names(values: Object) -> None:
    found = objects(values)
    deny = found["NetworkPolicy/r-default-deny"]["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not deny.keys() & {"ingress", "egress"}
    for key, each in objects(values, but=()).items():
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "r", key
        assert labels["app.kubernetes.io/managed-by"] == "Helm", key
    for key, pod in pods(values).items():
        assert f"ServiceAccount/{pod['serviceAccountName']}" in found, key
        denied = deny["podSelector"]["matchLabels"].items()
        assert denied <= pod_labels(found[key]).items(), key
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        spec = found[key].get("spec", {})
        claims = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
        for container in containers(pod):
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= volumes | claims, key


def test_the_only_folder_of_the_machine_is_the_shared_one() -> None:
    for key, pod in pods(RELAY).items():
        paths = [v["hostPath"]["path"] for v in pod.get("volumes", []) if "hostPath" in v]
        assert paths == (["/run/rose"] if key == "DaemonSet/r-node" else [])


def test_guests_go_first_and_push_nobody_out() -> None:
    priority = objects()["PriorityClass/r-guest"]
    assert priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    assert node_pod()["priorityClassName"] == "r-guest"


# ---- RBAC ----


def rules(values: Object) -> list[Object]:
    return [
        rule
        for key, each in objects(values).items()
        if key.startswith(("Role/", "ClusterRole/"))
        for rule in each["rules"]
    ]


def test_nobody_gets_more_than_policies_and_one_secret() -> None:
    people = {"operators": [{"kind": "User", "name": "ada"}], "viewers": VIEWERS}
    values = joined(SECRETS, {"rbac": people})
    read = []
    for rule in rules(values):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            read += rule["resourceNames"]
            assert rule["verbs"] == ["get"]
        elif rule["resources"] in (["events"], ["pods/status"]):
            assert rule["verbs"] == ["create" if rule["resources"] == ["events"] else "patch"]
        else:
            assert rule["apiGroups"] == ["rose.dev"]
    assert read == ["own-operator", "own-viewer"]
    for role, name in (("operator", "ada"), ("viewer", "auditors")):
        (subject,) = objects(values)[f"RoleBinding/r-{role}"]["subjects"]
        assert subject["name"] == name


def test_viewers_and_editors_are_aggregated() -> None:
    found = objects()
    viewer = found["ClusterRole/r-policy-viewer"]
    editor = found["ClusterRole/r-policy-editor"]
    to = "rbac.authorization.k8s.io/aggregate-to-"
    assert viewer["metadata"]["labels"][f"{to}view"] == "true"
    assert f"{to}view" not in editor["metadata"]["labels"]
    assert editor["rules"][0]["resources"] == ["rosecapacitypolicies"], "never the status"
    own = objects({"rbac": {"aggregate": False}})["ClusterRole/r-policy-viewer"]
    assert not [label for label in own["metadata"]["labels"] if "aggregate" in label]


# ---- network ----


def test_each_kind_of_pod_is_let_to_what_it_needs() -> None:
    found = objects(RELAY, WEBHOOK)
    kinds = {
        each["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for key, each in found.items()
        if key.startswith("NetworkPolicy/")
    }
    components = {"scheduler", "operator", "etcd", "gateway", "node", "relay", "webhook"}
    assert kinds == {None, *components}


def test_the_test_pod_passes_the_policies() -> None:
    found = objects()
    labels = found["Pod/r-test-hold"]["metadata"]["labels"]
    out = found["NetworkPolicy/r-operator"]["spec"]
    assert out["podSelector"]["matchLabels"].items() <= labels.items()
    assert 53 in [port["port"] for port in out["egress"][0]["ports"]]
    assert out["egress"][1]["ports"] == [{"protocol": "TCP", "port": 7400}]
    into = found["NetworkPolicy/r-scheduler"]["spec"]["ingress"][0]
    assert {"podSelector": {"matchLabels": out["podSelector"]["matchLabels"]}} in into["from"]


def test_gateways_alone_reach_guests_and_by_the_proxy_alone() -> None:
    far = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    found = objects(ACTIVE, {"networkPolicy": {"peers": {"gateways": [far]}}})
    port = [{"protocol": "TCP", "port": 7410}]
    into = found["NetworkPolicy/r-node"]["spec"]["ingress"][0]
    out = found["NetworkPolicy/r-gateway"]["spec"]["egress"]
    kinds = [each["podSelector"]["matchLabels"] for each in into["from"]]
    assert kinds[0]["app.kubernetes.io/component"] == "gateway"
    assert (kinds[1], into["ports"]) == ({"app": "gateway"}, port)
    assert [each["ports"] for each in out if "node" in str(each["to"])] == [port]
    ports = node_container(ACTIVE)["ports"]
    assert {"name": "turns", "containerPort": 7410} in ports
    assert "ports" not in node_container(), "nothing is lent, and nobody comes in"


def test_schedulers_alone_reach_the_store() -> None:
    first = objects()["NetworkPolicy/r-etcd"]["spec"]["ingress"][0]
    (peer,) = first["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "scheduler"


def test_nobody_outside_is_let_in_unless_named() -> None:
    silent = {"networkPolicy": {"peers": {"monitoring": []}}}
    assert "ingress" not in objects(silent)["NetworkPolicy/r-gateway"]["spec"]
    peer = {"podSelector": {"matchLabels": {"app": "trainer"}}}
    named = {"networkPolicy": {"peers": {"trainers": [peer]}}}
    for kind in ("gateway", "scheduler"):
        ingress = objects(named)[f"NetworkPolicy/r-{kind}"]["spec"]["ingress"][0]
        assert peer in ingress["from"]


def test_network_policies_have_a_switch() -> None:
    without = objects({"networkPolicy": {"enabled": False}})
    assert not [key for key in without if key.startswith("NetworkPolicy/")]


# ---- disruption, monitoring, CRD ----


def test_one_pod_of_a_kind_is_drained_at_a_time() -> None:
    budgets = {k for k in objects() if k.startswith("PodDisruptionBudget/")}
    assert budgets == {f"PodDisruptionBudget/r-{kind}" for kind in ("scheduler", "etcd", "gateway")}
    single = {
        "scheduler": {"replicas": 1},
        "gateway": {"replicas": 1},
        "store": {"own": {"members": 1}},
    }
    assert not [k for k in objects(single) if k.startswith("PodDisruptionBudget/")]


def test_scrapers_ask_for_the_name_of_the_role() -> None:
    found = objects(SECRETS, {"monitoring": {"podMonitor": True, "labels": {"team": "sre"}}})
    (endpoint,) = found["PodMonitor/r-scheduler"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == server_name(Role.SCHEDULER, "rose")
    assert found["PodMonitor/r-gateway"]["metadata"]["labels"]["team"] == "sre"
    (endpoint,) = found["PodMonitor/r-node"]["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["serverName"] == server_name(Role.NODE, "rose")
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == "own-nodes"
    peers = found["NetworkPolicy/r-node"]["spec"]["ingress"][1]
    assert peers["ports"] == [{"protocol": "TCP", "port": 7490}]


def test_the_trainers_job_keeps_its_name_in_prometheus() -> None:
    found = objects(RELAY, {"monitoring": {"podMonitor": True}})
    monitors = {k: v for k, v in found.items() if k.startswith("PodMonitor/")}
    kept = {
        key.removeprefix("PodMonitor/r-"): each["spec"]["podMetricsEndpoints"][0].get("honorLabels")
        for key, each in monitors.items()
    }
    assert kept == {"node": True, "scheduler": True, "gateway": True, "relay": True, "etcd": None}


def test_scrapers_reach_the_relay() -> None:
    ingress = objects(RELAY)["NetworkPolicy/r-relay"]["spec"]["ingress"]
    assert ingress[1]["ports"] == [{"protocol": "TCP", "port": 7610}]


def test_scraped_ports_are_there() -> None:
    found = objects(RELAY, {"monitoring": {"podMonitor": True}})
    for key, each in found.items():
        if not key.startswith("PodMonitor/"):
            continue
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        wanted = each["spec"]["selector"]["matchLabels"]
        (pod,) = [
            other["spec"]["template"]["spec"]
            for name, other in found.items()
            if name.startswith(("Deployment/", "StatefulSet/", "DaemonSet/"))
            and wanted.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        ports = [port["name"] for c in pod["containers"] for port in c["ports"]]
        assert endpoint["port"] in ports, key


@pytest.mark.parametrize("switch", ["podMonitor", "prometheusRule", "dashboards"])
def test_monitoring_has_a_switch_each(switch: str) -> None:
    kind = {"podMonitor": "PodMonitor/", "prometheusRule": "PrometheusRule/"}
    wanted = kind.get(switch, "ConfigMap/r-dashboard")
    assert not [key for key in objects() if key.startswith(wanted)]
    others = {k for k in objects({"monitoring": {switch: True}}) if k not in objects()}
    assert all(key.startswith(wanted) for key in others)


def test_rules_and_dashboards_are_what_lies_in_their_folders(tmp_path: Path) -> None:
    """Text in them that looks like a template is Prometheus' and Grafana's."""
    copy = tmp_path / "rose"
    shutil.copytree(CHART, copy)
    for folder in ("rules", "dashboards"):
        shutil.rmtree(copy / "files" / folder, ignore_errors=True)
        (copy / "files" / folder).mkdir()
    rules = {"groups": [{"name": "g", "rules": [{"alert": "A", "expr": "{{ $labels.node }}"}]}]}
    (copy / "files" / "rules" / "slo_burn.yaml").write_text(yaml.safe_dump(rules))
    (copy / "files" / "dashboards" / "fleet.json").write_text('{"title": "{{ node }}"}')
    values = joined(LEAST, {"monitoring": {"prometheusRule": True, "dashboards": True}})
    text = Chart.load(str(copy)).render(values=values, name="r")["rose/templates/monitoring.yaml"]
    found = {each["metadata"]["name"]: each for each in yaml.safe_load_all(text) if each}
    assert found["r-slo-burn"]["spec"] == rules
    assert found["r-dashboard-fleet"]["data"] == {"fleet.json": '{"title": "{{ node }}"}'}
    assert found["r-dashboard-fleet"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_speak_the_operators_words() -> None:
    """Severities, labels and the address of runbooks are values; series name cluster and node."""
    words = {"severities": {"page": "critical"}, "ruleLabels": {"team": "sre"}}
    for url, page in (
        ("https://docs.example.net/runbooks", "https://docs.example.net/runbooks/{}.md"),
        ("https://docs.example.net/NAME.html", "https://docs.example.net/{}.html"),
        ("", "docs/operators/runbooks/{}.md"),
    ):
        values = {"monitoring": {"prometheusRule": True, "runbookUrl": url, **words}}
        spec = objects(values)["PrometheusRule/r-rose-rules"]["spec"]
        alerts = [r for group in spec["groups"] for r in group["rules"] if "alert" in r]
        assert {each["labels"]["severity"] for each in alerts} == {"critical", "ticket", "info"}
        for each in alerts:
            assert each["labels"]["team"] == "sre"
            assert each["annotations"]["runbook_url"] == page.format(each["alert"])
    named = {"podMonitor": True, "prometheusUrl": "http://prometheus.monitoring:9090"}
    found = objects(SECRETS, {"cluster": "prod", "monitoring": named})
    (container,) = found["Deployment/r-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert "--prometheus=http://prometheus.monitoring:9090" in container["args"]
    peers = found["NetworkPolicy/r-scheduler"]["spec"]["egress"][1]["to"]
    assert peers[0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    (endpoint,) = found["PodMonitor/r-node"]["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [
        {"targetLabel": "cluster", "replacement": "prod"},
        {"targetLabel": "node", "sourceLabels": ["__meta_kubernetes_pod_node_name"]},
    ]


def test_the_crd_is_upgraded_with_the_chart_and_kept_without_it() -> None:
    (crd,) = [
        each for key, each in objects(but=()).items() if key.startswith("CustomResourceDefinition/")
    ]
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not chart().crds, "Helm never upgrades what is in the folder crds/"
    assert not texts({"crds": {"install": False}})["crds.yaml"].strip()


def test_services_name_their_protocol() -> None:
    """Server-side apply refuses a port without one on older servers."""
    for key, each in objects(RELAY).items():
        if key.startswith("Service/"):
            assert all(port["protocol"] == "TCP" for port in each["spec"]["ports"]), key


# ---- notes ----


def test_notes_say_mode_caps_and_how_to_stop() -> None:
    text = notes({"policy": {"maxHarvest": {"compute": 0.5, "nodes": "25%"}}})
    assert "mode: Advisory" in text
    assert "requests no GPU" in text
    assert 'caps: {"compute":0.5,"nodes":"25%"}' in text
    assert "--from=cronjob/r-stop-all" in text
    assert "helm -n rose-system test r" in text
    assert "WARNING: tls.insecure" in text


def test_notes_of_a_closed_installation_warn_of_nothing() -> None:
    assert "WARNING" not in notes(SECRETS)


def test_a_long_name_still_makes_names() -> None:
    values = joined(LEAST, {"monitoring": {"podMonitor": True}})
    name = "a" * 53
    for text in chart().render(values=values, name=name, namespace="ns").values():
        for line in text.splitlines():
            if line.startswith("  name: ") and "rose.dev" not in line:
                assert len(line.removeprefix("  name: ")) <= 63


def test_the_chart_is_installed_without_any_values() -> None:
    text = chart().render(values={}, name="r")
    assert "image: rose:" in text["rose/templates/scheduler.yaml"]
    assert "image: registry.k8s.io/etcd:3.5." in text["rose/templates/etcd.yaml"]
