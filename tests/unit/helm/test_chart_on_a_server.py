"""Install, test, upgrade, rollback and uninstall, on a real API server.

ROSE_KUBECONFIG names the file by which an administrator reaches one that may be written to: of
envtest, kind, or any that serves core types, RBAC and batch/v1. It needs no controllers: what would
run jobs and pods is stood in for here. A server without CronJobs of batch/v1 or policy/v1 gets the
chart without those objects.
"""

import contextlib
import json
import os
import shutil
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Config, HelmError

from tests.awaited import until
from tests.unit.helm.rendering import CHART, LEAST, NAMESPACE, Object, joined

KUBECONFIG = os.environ.get("ROSE_KUBECONFIG", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not KUBECONFIG, reason="ROSE_KUBECONFIG names no API server"),
]
RELEASE = "r"
POLL_S = 0.2


class ApiServer:
    """Speaks JSON to the server of a kubeconfig that has a client's certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        said = yaml.safe_load(kubeconfig.read_text())
        cluster, user = said["clusters"][0]["cluster"], said["users"][0]["user"]
        self._url = cluster["server"]
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._tls.load_cert_chain(user["client-certificate"], user["client-key"])

    def call(self, path: str, method: str = "GET", body: Object | None = None) -> Object:
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=json.dumps(body).encode() if body else None,
            headers={"Content-Type": kind},
        )
        with urllib.request.urlopen(request, context=self._tls, timeout=10) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def has(self, path: str) -> bool:
        try:
            self.call(path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True

    def serves(self, group: str, kind: str) -> bool:
        found = self.has(f"/apis/{group}") and self.call(f"/apis/{group}")["resources"]
        return bool(found and kind in {each["kind"] for each in found})


class StandIn:
    """Ends jobs and pods of tests, as a controller and a kubelet would; `phase` is how pods end."""

    def __init__(self, server: ApiServer) -> None:
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
            # What is deleted meanwhile needs nobody.
            with contextlib.suppress(urllib.error.HTTPError):
                self._end("/apis/batch/v1", "jobs", self._job)
                self._end("/api/v1", "pods", self._pod)

    def _end(self, group: str, kind: str, status: Callable[[Object], Object | None]) -> None:
        path = f"{group}/namespaces/{NAMESPACE}/{kind}"
        for each in self._server.call(path)["items"]:
            if said := status(each):
                name = each["metadata"]["name"]
                self._server.call(f"{path}/{name}/status", "PATCH", {"status": said})

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
def server() -> ApiServer:
    found = ApiServer(Path(KUBECONFIG))
    if not found.has(f"/api/v1/namespaces/{NAMESPACE}"):
        namespace: Object = {"metadata": {"name": NAMESPACE}}
        found.call("/api/v1/namespaces", "POST", namespace)
    return found


@pytest.fixture
def stand_in(server: ApiServer) -> Iterator[StandIn]:
    made = StandIn(server)
    yield made
    made.close()


@pytest.fixture
def chart(server: ApiServer, tmp_path: Path) -> str:
    """A copy of the chart for a server of any age."""
    copy = tmp_path / "rose"
    shutil.copytree(CHART, copy)
    said = (copy / "Chart.yaml").read_text().splitlines()
    kept = [line for line in said if not line.startswith("kubeVersion")]
    (copy / "Chart.yaml").write_text("\n".join(kept))
    if not server.serves("batch/v1", "CronJob"):
        (copy / "templates" / "commands.yaml").unlink()
    if not server.serves("policy/v1", "PodDisruptionBudget"):
        (copy / "templates" / "pdb.yaml").unlink()
    return str(copy)


def policy(server: ApiServer) -> Object:
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-policy"
    return json.loads(server.call(path)["data"]["policy.json"])  # type: ignore[no-any-return]


def revisions(helm: Config) -> list[Any]:
    return [each.get("revision") or each.get("version") for each in helm.history(RELEASE)]


def test_a_release_lives_and_leaves(server: ApiServer, stand_in: StandIn, chart: str) -> None:
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
