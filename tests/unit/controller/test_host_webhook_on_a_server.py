"""Pods are created through the real webhook by a real API server, and without it while it is down.

tests/harness/programs/api_server.py says which. The webhook is a process of its own, on loopback;
its configuration is the chart's, but for the address.
"""

import base64
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose.addresses import free_port
from rose.controller.host_webhook import LABEL, PATH, HostPods, with_rose
from rose.security.roles import Role
from tests.harness.certificates import Certificates
from tests.harness.programs.api_server import KUBECONFIG, MARKS, POLL_S, ApiClient, Object
from tests.harness.waiting import until
from tests.unit.helm.rendering import WEBHOOK, objects

pytestmark = MARKS
NAMESPACE = "rose-hosts-test"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SETTINGS = HostPods("rose:1")
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[ApiClient]:
    found = ApiClient(Path(KUBECONFIG))
    found.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    found.create(accounts, {"metadata": {"name": "default"}})
    yield found
    for each in found.call(PODS)["items"]:
        found.delete(f"{PODS}/{each['metadata']['name']}?gracePeriodSeconds=0")


@contextmanager
def webhook(folder: Path, port: int, issued: Certificates) -> Iterator[subprocess.Popen[str]]:
    """The webhook as its pod runs it, but for addresses."""
    ca, certificate, key = issued.of(Role.OPERATOR, "hook").paths
    command = [sys.executable, "-m", "rose.cli", "plugin", "webhook", f"--image={SETTINGS.image}"]
    command += [f"--port={port}", f"--ca={ca}", f"--certificate={certificate}", f"--key={key}"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert "listening on" in child.stdout.readline()
        yield child
    finally:
        child.terminate()
        child.wait(20)


@contextmanager
def configured(server: ApiClient, port: int, issued: Certificates) -> Iterator[None]:
    """The chart's configuration, with the address on loopback."""
    found = copy.deepcopy(objects(WEBHOOK)["MutatingWebhookConfiguration/r-webhook-rose-system"])
    (hook,) = found["webhooks"]
    bundle = base64.b64encode(issued.ca.file.read_bytes()).decode()
    hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{PATH}", "caBundle": bundle}
    path = f"{HOOKS}/{found['metadata']['name']}"
    server.delete(path)
    server.call(HOOKS, "POST", found)
    try:
        yield
    finally:
        server.delete(path)


def pod(name: str, labels: Object, annotations: Object | None = None) -> Object:
    container = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
        "spec": {"containers": [container], "automountServiceAccountToken": False},
    }


def is_host(found: Object) -> bool:
    return "ROSE_ROLE" in json.dumps(found["spec"]["containers"])


def test_a_labelled_pod_is_created_as_a_host_and_starts_without_the_webhook_too(
    server: ApiClient, tmp_path: Path
) -> None:
    labelled = {LABEL: "enabled"}
    port, issued = free_port(), Certificates(tmp_path)

    def tried() -> bool:
        return is_host(server.call(f"{PODS}?dryRun=All", "POST", pod("try", labelled)))

    with webhook(tmp_path, port, issued) as child, configured(server, port, issued):
        until(tried, PATIENCE_S, "the API server asks the webhook", every_s=POLL_S)
        made = server.call(PODS, "POST", pod("chat-0", labelled))
        assert is_host(made)
        # The stored pod has the API server's defaults, and the webhook would change nothing more.
        assert with_rose(made, SETTINGS) == made["spec"]
        (plugin,) = made["spec"]["initContainers"]
        assert plugin["image"] == SETTINGS.image
        assert made["spec"]["securityContext"]["supplementalGroups"] == [SETTINGS.group]
        assert not is_host(server.call(PODS, "POST", pod("plain", {})))
        odd = pod("odd", labelled, {f"{LABEL}-container": "sglang"})
        assert not is_host(server.call(PODS, "POST", odd)), "created as it is, with a warning"
        child.kill()
        child.wait()
        assert not is_host(server.call(PODS, "POST", pod("chat-1", labelled)))
