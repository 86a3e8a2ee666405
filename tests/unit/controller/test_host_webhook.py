"""Pods with the label become hosts; those that cannot start as they are, with a warning."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from executor.engine_settings import EngineSettings
from rose.controller.host_webhook import (
    MAX_WARNING_CHARS,
    PATH,
    PLUGIN_FOLDER,
    HostPods,
    answered,
    application,
)
from rose.process.http_port import HttpPort
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role
from tests.harness.certificates import Certificates

Object = dict[str, Any]
IMAGE = "registry.example.net/rose/rose@sha256:1"
SETTINGS = HostPods(IMAGE)


def pod(*containers: Object, annotations: Object | None = None, **spec: Any) -> Object:
    metadata: Object = {"generateName": "chat-", "labels": {"rose.dev/host": "enabled"}}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": [*containers], **spec}}


def vllm(name: str = "vllm", **more: Any) -> Object:
    return {"name": name, "image": "vllm/vllm-openai", "args": ["--model", "m"], **more}


def review(asked: Object) -> Object:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u-1", "namespace": "serving", "object": asked},
    }


def created(asked: Object) -> tuple[Object, list[str]]:
    """The pod that the API server would create, and the warnings that its user reads."""
    response = answered(review(asked), SETTINGS)["response"]
    assert (response["uid"], response["allowed"]) == ("u-1", True)
    found = copy.deepcopy(asked)
    if "patch" in response:
        assert response["patchType"] == "JSONPatch"
        for each in json.loads(base64.b64decode(response["patch"])):
            _, spec, key = each["path"].split("/")
            assert (each["op"], spec) == ("add", "spec")
            found["spec"][key] = each["value"]
    return found, response.get("warnings", [])


def env_of(container: Object) -> dict[str, Any]:
    found = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert len(found) == len(container["env"]), "a variable is there twice"
    return found


def test_a_pod_becomes_a_host_and_loses_nothing() -> None:
    cache = {"name": "cache", "emptyDir": {}}
    asked = pod(
        vllm(
            env=[{"name": "HF_HOME", "value": "/cache"}],
            volumeMounts=[{"name": "cache", "mountPath": "/cache"}],
        ),
        {"name": "metrics", "image": "other"},
        initContainers=[{"name": "fetch", "image": "fetch"}],
        volumes=[cache],
        securityContext={"runAsUser": 0, "supplementalGroups": [5]},
        nodeName="serving-0",
    )
    made, warnings = created(asked)
    assert not warnings
    spec = made["spec"]
    engine, other = spec["containers"]
    assert other == asked["spec"]["containers"][1]
    assert {**engine, "env": 0, "volumeMounts": 0} == {**vllm(), "env": 0, "volumeMounts": 0}
    assert env_of(engine) == {
        "HF_HOME": "/cache",
        "PYTHONPATH": PLUGIN_FOLDER,
        "ROSE_ROLE": "host",
        "ROSE_HOST_DIR": "/run/rose",
        "ROSE_PAGE_GROUP": "10777",
        "ROSE_POD_NAMESPACE": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
        "ROSE_POD_NAME": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
        # Kubernetes puts in what stands before it.
        "ROSE_HOST_NAME": "$(ROSE_POD_NAMESPACE).$(ROSE_POD_NAME)",
    }
    mounts = {each["name"]: each["mountPath"] for each in engine["volumeMounts"]}
    assert mounts == {"cache": "/cache", "rose-plugin": PLUGIN_FOLDER, "rose-host": "/run/rose"}
    assert {each["name"] for each in spec["volumes"]} == set(mounts)
    fetch, plugin = spec["initContainers"]
    assert fetch == {"name": "fetch", "image": "fetch"}
    assert (plugin["image"], plugin["command"]) == (
        IMAGE,
        ["rose", "plugin", "copy", PLUGIN_FOLDER],
    )
    # A pod of the class Guaranteed stays one.
    assert plugin["resources"]["requests"] == plugin["resources"]["limits"]
    assert spec["securityContext"] == {"runAsUser": 0, "supplementalGroups": [5, 10_777]}
    assert spec["nodeName"] == "serving-0"


def test_the_environment_is_one_that_the_plugin_takes() -> None:
    targets = {"rose.dev/slo-ttft-s": "0.5", "rose.dev/slo-tpot-s": "0.15"}
    made, _ = created(pod(vllm(), annotations=targets))
    env = env_of(made["spec"]["containers"][0]) | {"ROSE_HOST_NAME": "serving.chat-0"}
    settings = EngineSettings.from_environ(env)
    assert (settings.role, settings.page_path) == ("host", "/run/rose/serving.chat-0.page")
    assert (settings.ttft_s, settings.tpot_s, settings.page_group) == (0.5, 0.15, "10777")
    assert settings.found, "the node daemon finds it by its folder"


KEPT: list[tuple[str, str, Any]] = [
    ("PYTHONPATH", "/app", f"{PLUGIN_FOLDER}:/app"),
    ("PYTHONPATH", "", PLUGIN_FOLDER),
    ("VLLM_PLUGINS", "lora", "lora,rose_host"),
    ("VLLM_PLUGINS", "", ",rose_host"),
    ("SGLANG_PLUGINS", "other", "other,rose_host"),
    ("ROSE_SLO_TTFT_S", "2", "2"),
    ("ROSE_HOST_NAME", "chat", "chat"),
]


@pytest.mark.parametrize(("name", "value", "becomes"), KEPT)
def test_what_a_container_sets_itself_is_kept(name: str, value: str, becomes: str) -> None:
    asked = pod(
        vllm(env=[{"name": name, "value": value}]), annotations={"rose.dev/slo-ttft-s": "0.5"}
    )
    made, warnings = created(asked)
    assert not warnings
    assert env_of(made["spec"]["containers"][0])[name] == becomes


SIDECAR = {"name": "istio-proxy", "image": "istio"}
CHOSEN: list[tuple[Object, str]] = [
    ({}, "istio-proxy"),
    ({"kubectl.kubernetes.io/default-container": "vllm"}, "vllm"),
    (
        {
            "kubectl.kubernetes.io/default-container": "istio-proxy",
            "rose.dev/host-container": "vllm",
        },
        "vllm",
    ),
]


@pytest.mark.parametrize(("annotations", "engine"), CHOSEN)
def test_one_container_runs_the_engine(annotations: Object, engine: str) -> None:
    made, _ = created(pod(SIDECAR, vllm(), annotations=annotations))
    changed = [each["name"] for each in made["spec"]["containers"] if "env" in each]
    assert changed == [engine]


UNCHANGED: list[tuple[str, Object, str]] = [
    ("a host already", pod(vllm(env=[{"name": "ROSE_ROLE", "value": "host"}])), ""),
    ("a guest's pod", pod(SIDECAR, vllm(env=[{"name": "ROSE_ROLE", "value": ""}])), ""),
    ("its volume is there", pod(vllm(), volumes=[{"name": "rose-host", "emptyDir": {}}]), ""),
    (
        "no such container",
        pod(vllm(), SIDECAR, annotations={"rose.dev/host-container": "sglang"}),
        "names 'sglang', and its containers are vllm, istio-proxy",
    ),
    ("nothing to change", pod(), "its containers are "),
    (
        "a long name",
        pod(vllm(), annotations={"rose.dev/host-container": "x" * 300}),
        "rose.dev/host-container names",
    ),
    (
        "a volume in the place",
        pod(vllm(volumeMounts=[{"name": "run", "mountPath": "/run/rose/"}])),
        "container vllm has a volume at /run/rose",
    ),
    (
        "a target in other units",
        pod(vllm(), annotations={"rose.dev/slo-ttft-s": "500ms"}),
        "rose.dev/slo-ttft-s is '500ms'; give seconds",
    ),
    (
        "a path from elsewhere",
        pod(vllm(env=[{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {}}}])),
        "PYTHONPATH of container vllm comes from elsewhere",
    ),
]


@pytest.mark.parametrize(("asked", "warning"), [each[1:] for each in UNCHANGED])
def test_a_pod_that_cannot_become_a_host_starts_as_it_is(asked: Object, warning: str) -> None:
    made, warnings = created(asked)
    assert made == asked
    assert bool(warnings) is bool(warning)
    for line in warnings:
        assert warning in line
        assert line.startswith("not a host of ROSE: ")
        assert len(line) <= MAX_WARNING_CHARS


def test_asked_again_it_changes_nothing() -> None:
    once, _ = created(pod(vllm()))
    again, warnings = created(once)
    assert again == once
    assert not warnings


# ---- the server ----


async def test_it_answers_over_tls_and_says_a_line_for_each_pod(tmp_path: Path) -> None:
    files: CertificateFiles = Certificates(tmp_path).of(Role.OPERATOR, "hook")
    said: list[str] = []
    port = HttpPort(
        application(SETTINGS, said.append), "127.0.0.1", 0, files.server_context(everybody=True)
    )
    await port.start()
    try:
        url, tls = f"https://127.0.0.1:{port.port}{PATH}", files.client_context()
        async with aiohttp.ClientSession() as session:
            for asked, code in [
                (review(pod(vllm())), 200),
                (review(pod(vllm(), annotations={"rose.dev/host-container": "x"})), 200),
                ({"kind": "AdmissionReview"}, 400),
                ([1], 400),
            ]:
                async with session.post(url, json=asked, ssl=tls) as answer:
                    assert answer.status == code
                    if code == 200:
                        found = await answer.json()
                        assert found == answered(asked, SETTINGS)
    finally:
        await port.close()
    assert said[0] == "serving/chat-: a host of ROSE"
    assert said[1].startswith("serving/chat-: not a host of ROSE: ")
    assert len(said) == 2
