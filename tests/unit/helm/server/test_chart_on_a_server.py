"""Install, test, upgrade, rollback and uninstall, on a real API server.

tests/harness/programs/api_server.py says which; it serves batch/v1 too. It needs no controllers:
what would run jobs and pods is stood in for here. A server without CronJobs of batch/v1 or
policy/v1 gets the chart without those objects.
"""

import base64
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import urllib3
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from helm_python import Config, HelmError

from rose.cli.main import parser_of
from rose.controller.kube_api import REQUESTS, ApiError, KubeApi
from rose.controller.node_signer import NODE, NodeSigner
from rose.security.development_ca import DevelopmentCa
from tests.harness.programs.api_server import (
    APPLY,
    KUBECONFIG,
    MARKS,
    MERGE,
    POLL_S,
    STRATEGIC,
    ApiClient,
)
from tests.harness.waiting import until
from tests.unit.helm.rendering import (
    ACTIVE,
    ASK,
    CHART,
    LEAST,
    NAMESPACE,
    OWN_CA,
    RELAY,
    SECRETS,
    TRIAL,
    Object,
    joined,
    objects,
)

pytestmark = MARKS
RELEASE = "r"
# A server's words for a field of a newer release, and the oldest supported one.
TOO_NEW = "field not declared in schema"
OLDEST_MINOR = 30
ADMIN_ACCESS = "resource.kubernetes.io/admin-access"


class StandIn:
    """Ends jobs and pods of tests, as a controller and a kubelet would; `phase` is how pods end."""

    def __init__(self, server: ApiClient) -> None:
        self.phase = "Succeeded"
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            # An object that was deleted meanwhile needs no deletion.
            with contextlib.suppress(urllib.error.HTTPError):
                self._end("/apis/batch/v1", "jobs", self._job)
                self._end("/api/v1", "pods", self._pod)

    def _end(self, group: str, kind: str, status: Callable[[Object], Object | None]) -> None:
        path = f"{group}/namespaces/{NAMESPACE}/{kind}"
        for each in self._server.call(path)["items"]:
            if said := status(each):
                name = each["metadata"]["name"]
                self._server.call(
                    f"{path}/{name}/status", "PATCH", {"status": said}, kind=STRATEGIC
                )

    @staticmethod
    def _job(job: Object) -> Object | None:
        if job["status"].get("conditions"):
            return None
        at = job["metadata"]["creationTimestamp"]
        met = [
            {"type": kind, "status": "True", "reason": "StandIn", "lastTransitionTime": at}
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        return {"startTime": at, "completionTime": at, "succeeded": 1, "conditions": met}

    def _pod(self, pod: Object) -> Object | None:
        phase = pod["status"].get("phase", "Pending")
        return {"phase": self.phase} if phase in ("Pending", "Running") else None


@pytest.fixture
def server() -> ApiClient:
    found = ApiClient(Path(KUBECONFIG))
    if not found.has(f"/api/v1/namespaces/{NAMESPACE}"):
        namespace: Object = {"metadata": {"name": NAMESPACE}}
        found.call("/api/v1/namespaces", "POST", namespace)
    # NOTES.txt tells an operator to do this before a node may look at all GPUs.
    label: Object = {"metadata": {"labels": {ADMIN_ACCESS: "true"}}}
    found.call(f"/api/v1/namespaces/{NAMESPACE}", "PATCH", label, kind=MERGE)
    return found


@pytest.fixture
def stand_in(server: ApiClient) -> Iterator[StandIn]:
    made = StandIn(server)
    yield made
    made.close()


@pytest.fixture
def chart(server: ApiClient, tmp_path: Path) -> str:
    """A copy of the chart for a server of any age."""
    copy = tmp_path / "rose"
    shutil.copytree(CHART, copy)
    if minor(server) < OLDEST_MINOR:
        said = (copy / "Chart.yaml").read_text().splitlines()
        kept = [line for line in said if not line.startswith("kubeVersion")]
        (copy / "Chart.yaml").write_text("\n".join(kept))
        # Helm checks fields by the server's own list of them: without those of newer releases.
        for file in (copy / "templates").glob("*.*"):
            text = re.sub(r"^ +restartPolicy: Always\n", "", file.read_text(), flags=re.M)
            newer = r"^( +)(podFailurePolicy|startupProbe):\n(\1  .*\n)+"
            file.write_text(re.sub(newer, "", text, flags=re.M))
    if not server.serves("batch/v1", "CronJob"):
        (copy / "templates" / "commands.yaml").unlink()
    if not server.serves("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"):
        (copy / "templates" / "admission.yaml").unlink()
    if not server.serves("policy/v1", "PodDisruptionBudget"):
        (copy / "templates" / "pdb.yaml").unlink()
    return str(copy)


def minor(server: ApiClient) -> int:
    """N of 1.N."""
    return int(server.call("/version")["minor"].rstrip("+"))


def policy(server: ApiClient) -> Object:
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-policy"
    return json.loads(server.call(path)["data"]["policy.json"])  # type: ignore[no-any-return]


def revisions(helm: Config) -> list[Any]:
    return [each.get("revision") or each.get("version") for each in helm.history(RELEASE)]


def test_a_release_lives_and_leaves(server: ApiClient, stand_in: StandIn, chart: str) -> None:
    helm = Config(kubeconfig_path=KUBECONFIG, namespace=NAMESPACE)
    # The server's own CRDs are its owner's, and old ones know no rules.
    values = joined(LEAST, {"crds": {"install": False}})
    helm.install(chart, RELEASE, values, timeout=60)
    assert policy(server)["mode"] == "Advisory"
    daemons = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{RELEASE}-node"
    node = server.call(daemons)["spec"]["template"]["spec"]
    assert "resourceClaims" not in node

    with pytest.raises(HelmError, match="harvset"):
        helm.upgrade(chart, RELEASE, joined(values, {"harvset": {}}), timeout=60)
    assert revisions(helm) == [1], "nothing is half applied"

    helm.test(RELEASE, timeout=60)
    stand_in.phase = "Failed"
    with pytest.raises(HelmError):
        helm.test(RELEASE, timeout=60)

    helm.upgrade(chart, RELEASE, joined(values, {"mode": "Off"}), timeout=60)
    assert policy(server)["mode"] == "Off"

    # helm-python-sdk 0.2.2 raises it once the rollback is done.
    with contextlib.suppress(TypeError):
        helm.rollback(RELEASE, version=1, timeout=60)
    assert policy(server)["mode"] == "Advisory"
    assert revisions(helm) == [1, 2, 3]

    helm.uninstall(RELEASE, timeout=60)
    until(lambda: not server.has(daemons), 30, "the DaemonSet is gone", every_s=POLL_S)


def test_an_upgrade_keeps_the_ca_and_refuses_other_members_of_the_etcd(
    server: ApiClient, stand_in: StandIn, chart: str
) -> None:
    helm = Config(kubeconfig_path=KUBECONFIG, namespace=NAMESPACE)
    values: Object = {"crds": {"install": False}}
    helm.install(chart, RELEASE, values, timeout=60)
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-ca"
    before = server.call(path)["data"]
    try:
        with pytest.raises(HelmError, match=r"members is 1, .* has 3: .*store.own.members=3"):
            helm.upgrade(
                chart, RELEASE, joined(values, {"store": {"own": {"members": 1}}}), timeout=60
            )
        with pytest.raises(HelmError, match="leave trial out"):
            helm.upgrade(chart, RELEASE, joined(values, {"trial": True}), timeout=60)
        assert revisions(helm) == [1], "nothing is half applied"
        helm.upgrade(chart, RELEASE, joined(values, {"toolbox": {"enabled": True}}), timeout=60)
        assert server.call(path)["data"] == before
    finally:
        helm.uninstall(RELEASE, timeout=60)


@pytest.mark.parametrize(
    "values",
    [{}, SECRETS, RELAY, ACTIVE, TRIAL, ASK],
    ids=["least", "tls", "relay", "on", "trial", "ask"],
)
def test_what_is_rendered_is_applied_by_the_server(server: ApiClient, values: Object) -> None:
    asked, accounts = 0, []
    # A pod is admitted where its service account is.
    made = sorted(objects(values).values(), key=lambda each: each["kind"] != "ServiceAccount")
    for each in made:
        known = server.resources(each["apiVersion"]).get(each["kind"])
        if known is None:
            continue
        asked += 1
        group = "/apis/" if "/" in each["apiVersion"] else "/api/"
        space = each["metadata"].get("namespace", NAMESPACE)
        where = f"namespaces/{space}/" if known["namespaced"] else ""
        path = f"{group}{each['apiVersion']}/{where}{known['name']}/{each['metadata']['name']}"
        query = "?fieldManager=rose&force=true"
        if each["kind"] == "Pod":
            # A pod of another release's `helm test` may be left: a pod is not changed.
            with contextlib.suppress(urllib.error.HTTPError):
                server.call(f"{path}?gracePeriodSeconds=0", "DELETE")
        if each["kind"] == "ServiceAccount":
            accounts.append(path)
        else:
            query += "&dryRun=All"
        try:
            server.call(path + query, "PATCH", each, kind=APPLY)
        except urllib.error.HTTPError as error:
            # Native sidecars and claims are newer than a server of Debian's packages; what each
            # supported release takes is tried without a server (`test_chart_matrix`).
            said = error.read().decode()
            assert TOO_NEW in said, f"{path}: {said}"
            assert minor(server) < OLDEST_MINOR, said
    for path in accounts:
        server.call(path, "DELETE")
    assert asked > 20


# ---- day one ----

ROOT = CHART.parents[1]
HOST = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "chat"},
    "spec": {
        "selector": {"matchLabels": {"app": "chat"}},
        "template": {
            "metadata": {"labels": {"app": "chat"}},
            "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        },
    },
}


def kubectl(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    built = Path.home() / ".cache" / "rose-kube" / "bin" / "kubectl"
    program = shutil.which("kubectl") or str(built)
    return subprocess.run(
        [program, f"--kubeconfig={KUBECONFIG}", *words], cwd=cwd, capture_output=True, text=True
    )


def day_one() -> tuple[list[list[str]], str]:
    """The commands of the page, and the patch of a host that one of them names."""
    page = (ROOT / "docs" / "operators" / "install.md").read_text()
    part = page.partition("## Day one")[2]
    commands, patch = re.findall(r"```(?:bash|yaml)\n(.*?)```", part, re.S)[:2]
    lines = commands.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines], patch


def test_day_one_is_four_commands(
    server: ApiClient, stand_in: StandIn, chart: str, tmp_path: Path
) -> None:
    commands, patch = day_one()
    assert len(commands) == 4
    install, label, host, explain = commands
    (tmp_path / "rose-host.yaml").write_text(patch)
    # A cluster with a machine and a server of models on it.
    machine: Object = {"metadata": {"name": "serving-0"}}
    if not server.has("/api/v1/nodes/serving-0"):
        server.call("/api/v1/nodes", "POST", machine)
        server.call("/api/v1/namespaces", "POST", {"metadata": {"name": "serving"}})
        server.call("/apis/apps/v1/namespaces/serving/deployments", "POST", HOST)
    began_s = time.monotonic()
    assert install[:4] == ["helm", "install", "rose", "helm/rose"]
    assert install[4:7] == ["--namespace", NAMESPACE, "--create-namespace"]
    given = dict(each.split("=", 1) for each in install[7:] if each != "--set")
    assert given.keys() == {"trial", "images.control.repository"}
    values: Object = {
        "trial": given["trial"] == "true",
        "images": {"control": {"repository": given["images.control.repository"]}},
        "crds": {"install": False},
    }
    helm = Config(kubeconfig_path=KUBECONFIG, namespace=NAMESPACE)
    helm.install(chart, "rose", values, timeout=60)
    try:
        for words in (label, host):
            done = kubectl(*words[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        took_s = time.monotonic() - began_s
        sys.stdout.write(f"three of four commands: {took_s:.1f} s\n")
        assert took_s < 60
        selector = {"rose.dev/harvest": "enabled"}
        labels = server.call("/api/v1/nodes/serving-0")["metadata"]["labels"]
        assert selector.items() <= labels.items()
        (vllm,) = server.call("/apis/apps/v1/namespaces/serving/deployments/chat")["spec"][
            "template"
        ]["spec"]["containers"]
        assert vllm["image"] == "vllm"
        assert {"name": "ROSE_ROLE", "value": "host"} in vllm["env"]
        # Pods run in test_chart_processes.py; here is what the last command names.
        assert explain[:5] == ["kubectl", "-n", NAMESPACE, "exec", "deploy/rose-toolbox"]
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/rose-toolbox"
        assert server.has(path)
        assert callable(parser_of(explain[7]).parse_args(explain[8:]).run)
    finally:
        helm.uninstall("rose", timeout=60)


class Posing:
    """Configuration of the client of an administrator who poses as a pod of the release."""

    def __init__(self, host: str, pod: str, **extra: str) -> None:
        self.host = host
        account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-{pod}"
        self._headers = {"Impersonate-User": account, **extra}

    def auth_settings(self) -> Object:
        return {key: {"key": key, "value": value} for key, value in self._headers.items()}


@contextlib.contextmanager
def administrator(server: ApiClient) -> Iterator[urllib3.PoolManager]:
    said = yaml.safe_load(Path(KUBECONFIG).read_text())["users"][0]["user"]
    certificate, key = said["client-certificate"], said["client-key"]
    with urllib3.PoolManager(ca_certs=server.ca, cert_file=certificate, key_file=key) as pool:
        yield pool


def test_a_schedulers_token_labels_a_pod_and_changes_no_spec(
    server: ApiClient, stand_in: StandIn, chart: str
) -> None:
    helm = Config(kubeconfig_path=KUBECONFIG, namespace=NAMESPACE)
    named: Object = {"crds": {"install": False}, "controller": {"nodeLabels": ["rose.dev/*"]}}
    helm.install(chart, RELEASE, joined(LEAST, named), timeout=60)
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pod: Object = {
        "metadata": {"name": "own"},
        "spec": {
            "serviceAccountName": f"{RELEASE}-scheduler",
            "automountServiceAccountToken": False,
            "containers": [{"name": "scheduler", "image": "rose"}],
        },
    }
    server.call(pods, "POST", pod)
    try:
        with administrator(server) as pool:
            api = KubeApi(pool, Posing(server.url, "scheduler"))
            for leads, labels in ((True, {"rose.dev/leader": "true"}), (False, {})):
                api.mark_leader(f"{NAMESPACE}/own", leads)
                assert server.call(f"{pods}/own")["metadata"].get("labels", {}) == labels
            spec = {"spec": {"containers": [{"name": "scheduler", "image": "evil"}]}}
            with pytest.raises(ApiError, match="cannot patch resource"):
                api._read("PATCH", f"{pods}/own", spec, content=MERGE)
            api._read("PATCH", f"{pods}/own/status", spec, content=MERGE)
            assert server.call(f"{pods}/own")["spec"]["containers"][0]["image"] == "rose"
            assert {"metadata"} <= json.loads(api.nodes()).keys(), "nodes may be listed"
            with pytest.raises(ApiError, match="cannot list resource"):
                api._read("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets")
    finally:
        server.call(f"{pods}/own?gracePeriodSeconds=0", "DELETE")
        helm.uninstall(RELEASE, timeout=60)


def test_a_node_asks_and_the_signer_signs_by_the_rights_that_they_have(
    server: ApiClient, stand_in: StandIn, chart: str, tmp_path: Path
) -> None:
    helm = Config(kubeconfig_path=KUBECONFIG, namespace=NAMESPACE)
    values = joined(LEAST, OWN_CA, {"crds": {"install": False}})
    helm.install(chart, RELEASE, values, timeout=60)
    # A token that is bound to a pod says its node, since Kubernetes 1.30.
    bound = {f"Impersonate-Extra-{quote(NODE, safe='')}": "n0"}
    ca = DevelopmentCa.make(tmp_path, "rose")
    account, signer = f"{NAMESPACE}:{RELEASE}-node", f"rose.dev/{NAMESPACE}.{RELEASE}"
    try:
        with administrator(server) as pool:
            node = KubeApi(pool, Posing(server.url, "node", **bound))
            other = KubeApi(pool, Posing(server.url, "gateway", **bound))
            signs = KubeApi(pool, Posing(server.url, "signer"))
            made = json.loads(node._read("POST", REQUESTS, asked_by_a_node(signer)))
            with pytest.raises(ApiError, match="cannot create resource"):
                other._read("POST", REQUESTS, asked_by_a_node(signer))
            # An administrator's is a stranger's.
            stranger = server.call(REQUESTS, "POST", asked_by_a_node(signer))
            kubelet = server.call(REQUESTS, "POST", asked_by_a_node("rose.dev/other.release"))
            lines = NodeSigner(signs, lambda: ca, signer, account, 3_600.0).look()
            assert sorted(line.partition(": ")[2][:20] for line in lines) == [
                "a certificate of node"[:20],
                "denied: rose-system:"[:20],
            ]
            assert NodeSigner(signs, lambda: ca, signer, account, 3_600.0).look() == []
            name = made["metadata"]["name"]
            status = json.loads(node._read("GET", f"{REQUESTS}/{name}"))["status"]
            assert b"BEGIN CERTIFICATE" in base64.b64decode(status["certificate"])
            refused = server.call(f"{REQUESTS}/{stranger['metadata']['name']}")["status"]
            assert refused["conditions"][0]["type"] == "Denied"
            # Its rights are of one signer's name.
            with pytest.raises(ApiError, match="not permitted to approve"):
                signs.judge_request(kubelet["metadata"]["name"], "Approved", "")
    finally:
        helm.uninstall(RELEASE, timeout=60)


def asked_by_a_node(signer: str) -> Object:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    asked = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    pem = asked.public_bytes(serialization.Encoding.PEM)
    return {
        "metadata": {"generateName": "rose-node-"},
        "spec": {
            "signerName": signer,
            "request": base64.b64encode(pem).decode(),
            "usages": ["digital signature", "server auth", "client auth"],
        },
    }
