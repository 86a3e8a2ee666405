"""Install, test, upgrade, rollback and uninstall, on a real API server.

tests/harness/api_server.py says which; it serves batch/v1 too. It needs no controllers: what would
run jobs and pods is stood in for here. A server without CronJobs of batch/v1 or policy/v1 gets the
chart without those objects.
"""

import contextlib
import json
import re
import shutil
import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config, HelmError

from tests.harness.api_server import APPLY, KUBECONFIG, MARKS, MERGE, POLL_S, STRATEGIC, ApiServer
from tests.harness.waiting import until
from tests.unit.helm.rendering import (
    ACTIVE,
    ASK,
    CHART,
    LEAST,
    NAMESPACE,
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
def server() -> ApiServer:
    found = ApiServer(Path(KUBECONFIG))
    if not found.has(f"/api/v1/namespaces/{NAMESPACE}"):
        namespace: Object = {"metadata": {"name": NAMESPACE}}
        found.call("/api/v1/namespaces", "POST", namespace)
    # NOTES.txt tells an operator to do this before a node may look at all GPUs.
    label: Object = {"metadata": {"labels": {ADMIN_ACCESS: "true"}}}
    found.call(f"/api/v1/namespaces/{NAMESPACE}", "PATCH", label, kind=MERGE)
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


def minor(server: ApiServer) -> int:
    """N of 1.N."""
    return int(server.call("/version")["minor"].rstrip("+"))


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


def test_an_upgrade_keeps_the_ca_and_refuses_other_members_of_the_etcd(
    server: ApiServer, stand_in: StandIn, chart: str
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
def test_what_is_rendered_is_applied_by_the_server(server: ApiServer, values: Object) -> None:
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
