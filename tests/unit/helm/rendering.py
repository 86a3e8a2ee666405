"""Renders the chart offline, with Helm's own code, once for each set of values."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from weight_transfer import SigningKey

CHART = Path(__file__).parents[3] / "helm" / "rose"
DIGEST = "sha256:" + "a" * 64
KEY = SigningKey.generate().verify_key.hex
POD_IP = "10.0.0.7"
RELEASE, NAMESPACE = "r", "rose-system"

Object = dict[str, Any]
# The least that an operator has to say.
LEAST: Object = {
    "images": {name: {"digest": DIGEST} for name in ("control", "etcd")},
    "tls": {"insecure": True},
}
# Certificates of the chart's own making, as without any values.
SELF_MADE: Object = {"tls": {"insecure": False}}
TRIAL: Object = {
    "trial": True,
    "images": {name: {"digest": ""} for name in ("control", "etcd")},
    **SELF_MADE,
}
CERT_MANAGER: Object = {
    "tls": {
        "insecure": False,
        "certManager": {"enabled": True, "issuer": {"name": "rose-ca"}, "nodes": ["n0", "n1"]},
    }
}
# By cert-manager without a list of nodes: each asks for its own.
ASK: Object = {
    "tls": {"insecure": False, "certManager": {"enabled": True, "issuer": {"name": "rose-ca"}}}
}
# Each asks for its own, of a CA that is not cert-manager's.
OWN_CA: Object = {
    "tls": {
        "insecure": False,
        "secrets": {
            "scheduler": "s",
            "gateway": "g",
            "operator": "o",
            "nodeCa": "own-ca",
        },
    }
}
SECRETS: Object = {
    "tls": {
        "insecure": False,
        "secrets": {
            role: f"own-{role}"
            for role in ("scheduler", "gateway", "relay", "operator", "viewer", "nodes")
        },
    }
}
GUEST: Object = {
    "id": "guest-0",
    "kind": "guest",
    "model_dir": "/models/policy",
    "port": 8100,
    "device": "host",
    "kv_bytes": 4_294_967_296,
}
ACTIVE: Object = {
    "mode": "Active",
    "images": {"node": {"digest": DIGEST}},
    "node": {"config": {"verify_key": KEY, "replicas": [GUEST]}},
}
QUOTAS: Object = {
    "quotas": [
        {
            "job": "grpo_1.A",
            "namespace": "training",
            "queue": "borrowed",
            "most": 4,
            "priorityClass": "low",
        },
        {"job": "evals", "queue": "team-a", "most": 2, "scheduler": "kai"},
    ]
}
RELAY: Object = {
    "relay": {
        "enabled": True,
        "jobs": [
            {"name": "grpo", "origin": "https://trainer:7000", "verifyKey": KEY},
            {"name": "ppo", "origin": "https://other:7000", "verifyKey": KEY},
        ],
    }
}
WEBHOOK: Object = {"webhook": {"enabled": True}}
NODES_ONLY: Object = {"role": "nodes", "schedulers": ["s0.example.net:7400", "s1.example.net:7400"]}


def joined(*values: Object) -> Object:
    """Values over values, as Helm takes several files."""
    found: Object = {}
    for each in values:
        for key, value in each.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = joined(found[key], value) if both else value
    return found


@lru_cache(maxsize=1)
def chart() -> Chart:
    return Chart.load(str(CHART))


@lru_cache(maxsize=256)
def _rendered(values: str) -> dict[str, str]:
    return chart().render(values=json.loads(values), name=RELEASE, namespace=NAMESPACE)


def texts(*values: Object) -> dict[str, str]:
    """Return each template's text, for the least values and these over them."""
    found = _rendered(json.dumps(joined(LEAST, *values), sort_keys=True))
    return {name.removeprefix("rose/templates/"): text for name, text in found.items()}


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def objects(*values: Object, but: tuple[str, ...] = ("crds.yaml",)) -> dict[str, Object]:
    """Objects as `KIND/NAME`."""
    found = {}
    for name, text in texts(*values).items():
        if name.endswith(".yaml") and name not in but:
            for each in _parsed(text):
                key = f"{each['kind']}/{each['metadata']['name']}"
                assert key not in found, f"{key} is there twice"
                found[key] = each
    return found


def notes(*values: Object) -> str:
    return texts(*values)["NOTES.txt"]


def pod_of(each: Object) -> Object | None:
    """The pod's spec in an object, if it has one."""
    spec: Object = each.get("spec", {})
    if each["kind"] == "Pod":
        return spec
    if each["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    found: Object | None = spec.get("template", {}).get("spec")
    return found


def pod_labels(each: Object) -> Object:
    """Labels of the pods that an object makes, or of the pod that it is."""
    if each["kind"] == "Pod":
        return each["metadata"]["labels"]  # type: ignore[no-any-return]
    spec = each["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else each["spec"]
    return spec["template"]["metadata"]["labels"]  # type: ignore[no-any-return]


def pods(*values: Object) -> dict[str, Object]:
    """Specs of all pods, as `KIND/NAME` of what makes them."""
    return {key: pod for key, each in objects(*values).items() if (pod := pod_of(each))}


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def node_pod(*values: Object) -> Object:
    return pods(*values)["DaemonSet/r-node"]


def node_container(*values: Object) -> Object:
    (found,) = node_pod(*values)["containers"]
    return found  # type: ignore[no-any-return]


def node_file(*values: Object) -> Object:
    """The node's file as the pod on machine `n0` reads it."""
    (config,) = [c for c in node_pod(*values)["initContainers"] if c["name"] == "config"]
    text = config["args"][0].replace("$(NODE_NAME)", "n0").replace("$(POD_IP)", POD_IP)
    return json.loads(text.replace("$$(", "$("))  # type: ignore[no-any-return]
