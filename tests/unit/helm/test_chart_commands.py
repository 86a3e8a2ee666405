"""Commands in the chart are those of `rose`, with its options, and probes ask real ports."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic_scheduler.capacity import parse_policy
from rose.cli.main import parser_of
from rose.controller.alerts import read_rules
from rose.gateway.settings import COUNTS, TIMES, parse_settings
from rose.main.scheduler import settings_of
from rose.node.config import NodeConfig
from rose.scheduler.webhook import Severity, WebhookSettings
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role
from rose.weight_distribution import relay
from tests.unit.helm.rendering import (
    ACTIVE,
    CERT_MANAGER,
    NAMESPACE,
    NODES_ONLY,
    QUOTAS,
    RELAY,
    SECRETS,
    Object,
    node_container,
    node_file,
    node_pod,
    objects,
    pods,
)

TLS = "/etc/rose/tls/"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """A folder for each role, with the files that a pod of it has."""
    root = tmp_path_factory.mktemp("ca")
    ca = DevelopmentCa.make(root, "rose")
    found = {}
    for role, name in ((Role.SCHEDULER, "s"), (Role.GATEWAY, "g"), (Role.NODE, "n0")):
        issued = ca.issue(role, name)
        folder = found[role] = root / str(role)
        folder.mkdir()
        (folder / "ca.crt").symlink_to(ca.file)
        (folder / "tls.crt").symlink_to(issued.certificate)
        (folder / "tls.key").symlink_to(issued.key)
    return found


def words(key: str, *values: Object) -> list[str]:
    """Everything after `rose` in a pod's container."""
    (container,) = pods(*values)[key]["containers"]
    assert container["command"] == ["rose"]
    return [word.replace("$(POD_IP)", "10.0.0.7") for word in container["args"]]


def inside(folder: Path, args: list[str]) -> list[str]:
    return [arg.replace(TLS, f"{folder}/") for arg in args]


# ---- schedulers ----


def test_the_schedulers_command_is_one(certificates: dict[Role, Path]) -> None:
    name, *args = words("Deployment/r-scheduler", SECRETS)
    assert name == "scheduler"
    settings = settings_of(inside(certificates[Role.SCHEDULER], args))
    assert settings.advertise == "10.0.0.7:7400"
    assert settings.store.is_etcd
    assert settings.metrics_port == 7430
    assert not settings.insecure
    # A port-forward reaches it, and the network does not.
    assert settings.dashboard is not None
    assert (settings.dashboard.host, settings.dashboard.port) == ("127.0.0.1", 7480)


def test_the_schedulers_options_are_passed_on() -> None:
    given = {
        "scheduler": {"port": 7401, "cooldownS": 2.5, "holdS": 60, "replicas": 1,
                      "advertise": "s.example.net:443", "jobs": ["grpo=policy"],
                      "dashboardPort": None},
    }  # fmt: skip
    settings = settings_of(words("Deployment/r-scheduler", given)[1:])
    assert (settings.port, settings.cooldown_s, settings.hold_s) == (7401, 2.5, 60)
    assert settings.advertise == "s.example.net:443"
    assert settings.insecure
    assert settings.dashboard is None
    assert [each.job for each in settings.jobs] == ["grpo"]


def test_rules_of_alerts_reach_schedulers_and_alertmanager_their_port(tmp_path: Path) -> None:
    rule = {"match": {"severity": "page"}, "policy": {"name": "p", "mode": False}, "limit": "1h"}
    given = {"scheduler": {"alerts": {"tokenSecret": "shown", "rules": [rule]}}}
    settings = settings_of(words("Deployment/r-scheduler", given)[1:])
    assert settings.alerts_address == "0.0.0.0:7470"
    found = objects(given)
    (tmp_path / "rules.yaml").write_text(
        found["ConfigMap/r-scheduler-alerts"]["data"]["rules.yaml"]
    )
    [read] = read_rules(tmp_path / "rules.yaml")
    assert read.whole().mode == "Off", "as Helm reads it, an unquoted Off is false"
    mounts = {
        f"{each['mountPath']}/{name}"
        for each in found["Deployment/r-scheduler"]["spec"]["template"]["spec"]["containers"][0][
            "volumeMounts"
        ]
        for name in ("rules.yaml", "token")
    }
    assert {str(settings.alerts), str(settings.alerts_token_file)} <= mounts
    port = {"name": "alerts", "port": 7470, "targetPort": "alerts", "protocol": "TCP"}
    for service in ("r-scheduler", "r-leader"):
        assert port in found[f"Service/{service}"]["spec"]["ports"]
    into = found["NetworkPolicy/r-scheduler"]["spec"]["ingress"]
    assert {"protocol": "TCP", "port": 7470} in [port for each in into for port in each["ports"]]
    assert "ConfigMap/r-scheduler-alerts" not in objects()


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("https://h.example/x", 443),
        ("http://relay.ns.svc/x", 80),
        ("http://relay:8085/x?a=b", 8085),
    ],
)
def test_a_webhook_reaches_schedulers_with_its_secret_and_a_way_out(url: str, port: int) -> None:
    peer = {"namespaceSelector": {}}
    given = {
        "scheduler": {"webhook": {"url": url, "secret": "signs", "severity": "ticket"}},
        "networkPolicy": {"peers": {"webhook": [peer]}},
    }
    webhook = settings_of(words("Deployment/r-scheduler", given)[1:]).webhook
    assert webhook == WebhookSettings(url, Path("/etc/rose/webhook/secret"), Severity.TICKET)
    found = objects(given)
    pod = found["Deployment/r-scheduler"]["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "webhook"]
    assert volume["secret"]["secretName"] == "signs"
    mounts = pod["containers"][0]["volumeMounts"]
    assert "/etc/rose/webhook" in [each["mountPath"] for each in mounts]
    out = {"ports": [{"protocol": "TCP", "port": port}], "to": [peer]}
    assert out in found["NetworkPolicy/r-scheduler"]["spec"]["egress"]


# ---- gateways ----


def test_the_gateways_command_is_one(certificates: dict[Role, Path]) -> None:
    name, *args = words("Deployment/r-gateway", SECRETS)
    assert name == "gateway"
    settings = parse_settings(inside(certificates[Role.GATEWAY], args))
    assert settings.scheduler == "r-scheduler.rose-system.svc:7400"
    assert settings.port == 7450


def camel(option: str) -> str:
    first, *rest = option.split("-")
    return first + "".join(word.capitalize() for word in rest)


def test_every_option_of_a_gateway_reaches_it() -> None:
    options: dict[str, Any] = {camel(name): 7.5 for name in TIMES}
    options |= {camel(name): 268_435_456 for name in COUNTS}
    settings = parse_settings(words("Deployment/r-gateway", {"gateway": {"options": options}})[1:])
    for name in TIMES:
        assert getattr(settings, name.replace("-", "_")) == 7.5
    for name in COUNTS:
        assert getattr(settings, name.replace("-", "_")) == 268_435_456


def test_keys_of_tokens_reach_the_gateway() -> None:
    args = words("Deployment/r-gateway", {"gateway": {"tokenKeysSecret": "keys"}})
    assert parse_settings(args[1:]).token_keys == Path("/etc/rose/tokens/keys.json")


def test_a_claim_of_batches_reaches_the_gateways_folder() -> None:
    settings = {"gateway": {"batches": {"claim": "jobs"}}}
    args = words("Deployment/r-gateway", settings)
    folder = parse_settings(args[1:]).batch_dir
    pod = pods(settings)["Deployment/r-gateway"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "batches"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "batches"]
    assert folder == Path(mount["mountPath"])
    assert volume["persistentVolumeClaim"] == {"claimName": "jobs"}


# ---- the relay ----


def test_the_relays_command_is_one() -> None:
    name, *args = words("Deployment/r-relay", RELAY, SECRETS, {"relay": {"bytesPerS": 1 << 30}})
    assert name == "relay"
    parsed = relay.parser().parse_args(args)
    jobs = relay.followed_jobs(parsed.job, parsed.origin, parsed.verify_key)
    assert [each.job for each in jobs] == ["grpo", "ppo"]
    assert parsed.bytes_per_s == 1 << 30
    assert parsed.host == "r-relay.rose-system.svc"
    assert (parsed.metrics_host, parsed.metrics_port) == ("0.0.0.0", 7610)


# ---- nodes ----


@pytest.mark.parametrize("values", [{}, {"mode": "Off"}, ACTIVE], ids=["Advisory", "Off", "Active"])
def test_the_nodes_file_is_one(
    values: Object, tmp_path: Path, certificates: dict[Role, Path]
) -> None:
    assert node_container(values)["command"] == ["rose"]
    assert node_container(values)["args"] == ["node", "--config=/etc/rose/node/node.json"]
    file = tmp_path / "node.json"
    text = json.dumps(node_file(values, SECRETS))
    file.write_text(text.replace(TLS, f"{certificates[Role.NODE]}/"))
    config = NodeConfig.load(file)
    assert config.node == "n0"
    assert len(config.replicas) == (1 if values is ACTIVE else 0)
    assert config.unsigned == (values is not ACTIVE)
    assert config.host is None
    assert config.discover
    assert (config.discover.folder, config.discover.page_group) == (Path("/run/rose"), "10777")
    assert config.metrics_host == "127.0.0.1"
    urls = {config.offered_url(replica) for replica in config.replicas}
    assert urls == ({"https://10.0.0.7:7410/guest-0"} if values is ACTIVE else set())


def test_a_node_that_is_scraped_leaves_loopback_with_its_certificate(
    tmp_path: Path, certificates: dict[Role, Path]
) -> None:
    scraped = {"monitoring": {"podMonitor": True}}
    file = tmp_path / "node.json"
    text = json.dumps(node_file(SECRETS, scraped))
    file.write_text(text.replace(TLS, f"{certificates[Role.NODE]}/"))
    config = NodeConfig.load(file)
    assert (config.metrics_host, config.metrics_insecure) == ("0.0.0.0", False)
    for probe in ("readinessProbe", "livenessProbe"):
        assert "https://127.0.0.1" in node_container(SECRETS, scraped)[probe]["exec"]["command"][2]
    assert node_file(scraped)["metrics_insecure"] is True, "where nothing has certificates"
    folder = {"node": {"sharedFolder": {"path": "/srv/rose"}}}
    assert node_file(folder)["discover"]["folder"] == "/srv/rose"


def test_what_the_operator_writes_reaches_the_nodes_file() -> None:
    given = {
        "node": {
            "config": {
                "labels": {"rose.dev/deployment": "chat"},
                "host": {"page": "/run/rose/page", "ttft_target_s": 0.3},
                "receiver": {"bytes_per_s": 1_000_000_000_000},
            }
        }
    }
    config = NodeConfig.model_validate(node_file(given))
    assert config.labels == {"rose.dev/deployment": "chat"}
    assert config.host
    assert config.host.ttft_target_s == 0.3
    assert config.host.page_group == "10777"
    assert config.discover is None, "who names a host wants no other"
    assert config.receiver.bytes_per_s == 1_000_000_000_000


def test_the_file_is_written_as_it_is_said(tmp_path: Path) -> None:
    """Quotes, dollars and all; Kubernetes replaces the machine's name and nothing else."""
    odd = {"node": {"config": {"labels": {"note": 'it\'s $(HOME) "now" %s'}}}}
    (config,) = [c for c in node_pod(odd)["initContainers"] if c["name"] == "config"]
    (text,) = config["args"]
    expanded = text.replace("$(NODE_NAME)", "n0").replace("$$(", "$(")
    command = [word.replace("/etc/rose/node", str(tmp_path)) for word in config["command"]]
    subprocess.run([*command, expanded], check=True)
    written = json.loads((tmp_path / "node.json").read_text())
    assert written["node"] == "n0"
    assert written["labels"] == {"note": 'it\'s $(HOME) "now" %s'}


def identity(values: Object) -> str:
    (found,) = [c for c in node_pod(values)["initContainers"] if c["name"] == "identity"]
    assert found["command"][:2] == ["/bin/sh", "-c"]
    return str(found["command"][2])


@pytest.mark.parametrize("ca", ["ca.crt", "n0.ca"], ids=["own secret", "cert-manager"])
def test_a_node_is_handed_its_own_certificate(tmp_path: Path, ca: str) -> None:
    given, own, bin_ = tmp_path / "given", tmp_path / "own", tmp_path / "bin"
    for folder in (given, own, bin_):
        folder.mkdir()
    for name in (ca, "n0.crt", "n0.key", "n1.crt", "n1.key"):
        (given / name).write_text(name)
    # The first pause is the end of the test.
    (bin_ / "sleep").write_text("#!/bin/sh\nkill -TERM $PPID\n")
    (bin_ / "sleep").chmod(0o755)
    script = identity(CERT_MANAGER).replace("/certificates", str(given))
    script = script.replace("/etc/rose/tls", str(own))
    env = {"NODE_NAME": "n0", "PATH": f"{bin_}:{os.environ['PATH']}"}
    ended = subprocess.run(["/bin/sh", "-c", script], env=env, timeout=20)
    assert ended.returncode == 0
    assert {f.name: f.read_text() for f in own.iterdir()} == {
        "ca.crt": ca,
        "tls.crt": "n0.crt",
        "tls.key": "n0.key",
    }
    assert (own / "tls.key").stat().st_mode & 0o777 == 0o600


# ---- an operator's commands ----


@pytest.mark.parametrize("values", [{}, SECRETS], ids=["insecure", "secrets"])
@pytest.mark.parametrize("key", ["Job/r-policy", "CronJob/r-stop-all", "CronJob/r-resume"])
def test_an_operators_command_is_one(key: str, values: Object) -> None:
    args = words(key, values)
    parsed = parser_of(args[0]).parse_args(args[1:])
    assert parsed.scheduler == "r-scheduler:7400"
    assert bool(parsed.certificate) == bool(values)
    assert callable(parsed.run)


def test_commands_start_only_when_somebody_starts_them() -> None:
    for command in ("stop-all", "resume"):
        spec = objects()[f"CronJob/r-{command}"]["spec"]
        assert spec["suspend"] is True


def test_the_policy_is_put_in_force_after_each_change() -> None:
    job = objects()["Job/r-policy"]
    hooks = job["metadata"]["annotations"]["helm.sh/hook"].split(",")
    assert hooks == ["post-install", "post-upgrade", "post-rollback"]


def test_the_policy_is_one_that_schedulers_take() -> None:
    given = {"maxHarvest": {"compute": 0.5, "memory": "8Gi"}, "canary": {"percent": 5}}
    data = objects(ACTIVE, {"policy": given})["ConfigMap/r-policy"]["data"]
    policy = parse_policy(data["policy.json"])
    assert policy.name == "r"
    assert policy.mode == "Active"
    assert policy.max_harvest.memory == 8 << 30
    assert policy.canary.percent == 5


# ---- helm test ----

EXPLAINED = {
    "none": "no node is attached",
    "stopped": "n0: lends nothing\n  held back by the operator's stop: OFF",
    "lends": "n0: lends",
}


def hold(tmp_path: Path, explained: str, *, proof: int, answers: bool = True) -> tuple[int, str]:
    """Run the script of the test pod over a `rose` that writes down what it is told."""
    (container,) = pods()["Pod/r-test-hold"]["containers"]
    said = tmp_path / "said"
    (tmp_path / "rose").write_text(
        f"""#!/bin/sh
echo "$1 $2" >>{said}
case $1 in
  policy) [ {int(answers)} = 1 ] || exit 2; echo "{explained}" ;;
  stop-all) exit {proof} ;;
esac
"""
    )
    (tmp_path / "rose").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(container["command"], env=env, timeout=20, capture_output=True)
    return ended.returncode, " ".join(line.split()[0] for line in said.read_text().splitlines())


ALL_STEPS = "policy stop-all resume"


@pytest.mark.parametrize(
    ("explained", "proof", "answers", "code", "said"),
    [
        ("lends", 0, True, 0, ALL_STEPS),
        # Something is left, or unproved: the test fails, and goes on all the same.
        ("lends", 1, True, 1, ALL_STEPS),
        ("lends", 3, True, 3, ALL_STEPS),
        # An operator's stop outlives the test.
        ("stopped", 0, True, 0, "policy stop-all"),
        # Without nodes nothing is stopped, and without a scheduler the test fails.
        ("none", 0, True, 0, "policy"),
        ("none", 0, False, 2, "policy"),
    ],
)
def test_the_test_stops_everything_proves_it_and_goes_on(
    tmp_path: Path, explained: str, proof: int, answers: bool, code: int, said: str
) -> None:
    assert hold(tmp_path, EXPLAINED[explained], proof=proof, answers=answers) == (code, said)


def test_the_words_that_the_test_looks_for_are_the_commands() -> None:
    root = Path(__file__).parents[3]
    assert EXPLAINED["none"] in (root / "rose" / "cli" / "cluster" / "policy.py").read_text()
    assert (
        "the operator's stop" in (root / "rose" / "scheduler" / "core" / "capacity.py").read_text()
    )


# ---- probes, ports, scripts ----


def test_routes_of_probes_are_routes_of_the_code() -> None:
    found = pods()
    paths = {
        key: c["livenessProbe"]["httpGet"]["path"]
        for key, pod in found.items()
        for c in pod["containers"]
        if "httpGet" in c.get("livenessProbe", {})
    }
    assert paths == {
        "Deployment/r-scheduler": "/metrics",
        "Deployment/r-gateway": "/health",
        "StatefulSet/r-etcd": "/health?serializable=true",
    }


def test_a_nodes_probe_asks_its_own_metrics() -> None:
    container = node_container({"node": {"metricsPort": 9101}})
    code = container["livenessProbe"]["exec"]["command"][-1]
    compile(code, "probe", "exec")
    assert "127.0.0.1:9101/metrics" in code
    assert node_file({"node": {"metricsPort": 9101}})["metrics_port"] == 9101


# ---- policies as objects ----


OFF: Object = {"controller": {"enabled": False}}
OTHER: Object = {"controller": {"kubeconfigSecret": "serving"}}
SCHEDULER = "Deployment/r-scheduler"


def test_schedulers_act_on_objects_by_a_token_of_their_own() -> None:
    settings = settings_of(words(SCHEDULER)[1:])
    assert settings.kubernetes
    assert settings.kubeconfig is None
    with_token = [k for k, pod in pods(RELAY).items() if pod["automountServiceAccountToken"]]
    assert with_token == [SCHEDULER]
    assert objects()["ServiceAccount/r-scheduler"]["automountServiceAccountToken"] is False


def test_objects_of_another_cluster_count_by_its_kubeconfig() -> None:
    settings = settings_of(words(SCHEDULER, OTHER)[1:])
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
        assert not settings_of(words(SCHEDULER, values)[1:]).kubernetes


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


def test_labels_of_nodes_are_read_where_they_are_named_and_by_schedulers_alone() -> None:
    named: Object = {"controller": {"nodeLabels": ["pool", "example.com/*"]}}
    assert settings_of(words(SCHEDULER, named)[1:]).node_labels == ("pool", "example.com/*")
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    assert rule in objects(named)["ClusterRole/r-controller"]["rules"]
    assert rule not in objects()["ClusterRole/r-controller"]["rules"]
    with_token = [k for k, pod in pods(named).items() if pod["automountServiceAccountToken"]]
    assert with_token == [SCHEDULER]


def test_placeholder_pods_ask_for_a_borrowed_gpu_in_a_queue() -> None:
    found = objects(QUOTAS)
    kueue = found["Deployment/r-quota-grpo-1-a"]
    kai = found["Deployment/r-quota-evals"]
    assert [each["spec"]["replicas"] for each in (kueue, kai)] == [4, 2]
    assert [each["metadata"]["namespace"] for each in (kueue, kai)] == ["training", NAMESPACE]
    labels = kueue["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "borrowed"
    assert labels["kueue.x-k8s.io/priority-class"] == "low"
    resource = {"rose.dev/borrowed-gpu": 1}
    for each, job, asks in ((kueue, "grpo_1.A", {}), (kai, "evals", {"cpu": "10m"})):
        template, chosen = each["spec"]["template"], each["spec"]["selector"]["matchLabels"]
        labels = template["metadata"]["labels"]
        assert labels["rose.dev/job"] == job
        assert labels.items() >= chosen.items()
        assert not [label for label in labels if "version" in label or "chart" in label]
        [container] = template["spec"]["containers"]
        assert container["resources"] == {"requests": {**resource, **asks}, "limits": resource}
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert template["spec"]["automountServiceAccountToken"] is False
    said = kai["spec"]["template"]
    assert said["metadata"]["labels"]["kai.scheduler/queue"] == "team-a"
    assert said["spec"]["schedulerName"] == "kai-scheduler"
    assert said["spec"]["priorityClassName"] == "train", "preemptible"
    assert "schedulerName" not in kueue["spec"]["template"]["spec"]


def test_schedulers_may_count_placeholder_pods_and_write_what_nodes_lend_and_no_more() -> None:
    settings = settings_of(words(SCHEDULER, QUOTAS)[1:])
    assert settings.quotas == {"grpo_1.A": "training", "evals": NAMESPACE}
    found = objects(QUOTAS)
    lists = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    for name, namespace in (("grpo-1-a", "training"), ("evals", NAMESPACE)):
        role, binding = (found[f"{kind}/r-controller-{name}"] for kind in ("Role", "RoleBinding"))
        assert role["rules"] == [lists]
        assert [each["metadata"]["namespace"] for each in (role, binding)] == [namespace] * 2
        assert binding["subjects"][0]["namespace"] == NAMESPACE
    before = objects()["ClusterRole/r-controller"]["rules"]
    more = [rule for rule in found["ClusterRole/r-controller"]["rules"] if rule not in before]
    assert more == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]
    assert not [key for key in objects() if "quota" in key], "off by default"


def test_the_leader_may_label_its_own_pod_and_no_other() -> None:
    found = objects()
    role = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
    assert found["Role/r-controller"]["rules"] == [role]
    fence = found["ValidatingAdmissionPolicy/r-controller-rose-system"]["spec"]
    assert (
        '"system:serviceaccount:rose-system:r-scheduler"'
        in fence["matchConditions"][0]["expression"]
    )
    own, same = [each["expression"] for each in fence["validations"]]
    assert "authentication.kubernetes.io/pod-name" in own
    assert same == "object.status == oldObject.status"
    binding = found["ValidatingAdmissionPolicyBinding/r-controller-rose-system"]["spec"]
    assert binding["policyName"] == "r-controller-rose-system"
    selector = found["Service/r-leader"]["spec"]["selector"]
    assert selector["rose.dev/leader"] == "true"
    (container,) = pods()[SCHEDULER]["containers"]
    assert "--pod=rose-system/$(POD_NAME)" in container["args"]


@pytest.mark.parametrize("values", [OFF, OTHER], ids=["off", "other cluster"])
def test_without_a_token_only_a_single_scheduler_is_followed(values: Object) -> None:
    assert "Service/r-leader" not in objects(values)
    assert "Service/r-leader" in objects(values, {"scheduler": {"replicas": 1}})
    assert not settings_of(words(SCHEDULER, values)[1:]).pod


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
