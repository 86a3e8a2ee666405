"""KubeApi: the few calls of the API server that schedulers make, each bounded in time.

The official client reads kubeconfigs and a pod's token, and renews it; its connections carry the
calls. All methods block, and are for threads.
"""

import json
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

from elastic_scheduler.capacity.crd import GROUP, PLURAL, VERSION
from rose.controller.conditions import EVENTS_IN
from rose.errors import ConfigError, UnavailableError

PATH: Final = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
NODES: Final = "/api/v1/nodes?resourceVersion=0"
REQUESTS: Final = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
EVENTS: Final = f"/api/v1/namespaces/{EVENTS_IN}/events"
LEADER_LABEL: Final = "rose.dev/leader"
# Label of placeholder pods; resource of Kubernetes nodes, and their label with its number.
JOB_LABEL: Final = "rose.dev/job"
RESOURCE: Final = "rose.dev/borrowed-gpu"
JSON: Final = "application/json"
# Names, uids and versions: a tenth of the bytes of the objects.
METADATA: Final = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
MERGE: Final = "application/merge-patch+json"
CONNECT_S: Final = 1.0
ANSWER_S: Final = 2.0
LOGIN_S: Final = 10.0
MAX_BODY_BYTES: Final = 32 << 20
MAX_WHY: Final = 300

INSTALL: Final = "the Kubernetes client is not installed; pip install 'rose-rollout[kubernetes]'"
NO_DEFINITION: Final = (
    f"the cluster has no {PLURAL}.{GROUP}; install the chart with crds.install=true, or"
    " kubectl apply --server-side -f helm/rose/files/crds/"
)


class ApiError(UnavailableError):
    """Error of a refused or unanswered call of the API server; code: HTTP's, 0 for none."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class KubeApi:
    """Blocking client of the API server for policy objects, their statuses and events."""

    def __init__(self, pool: Any, configuration: Any) -> None:  # noqa: ANN401 - of the client
        self._pool, self._configuration = pool, configuration

    @classmethod
    def opened(cls, kubeconfig: Path | None) -> Self:
        """Return a client by a kubeconfig, or by the pod's own token (None). Raises ConfigError."""
        try:
            # The import takes half a second and 40 MB, which only processes that watch objects
            # need.
            from kubernetes import client, config
        except ImportError:
            raise ConfigError(INSTALL) from None
        configuration = client.Configuration()
        try:
            if kubeconfig is None:
                config.load_incluster_config(client_configuration=configuration)
            else:
                _log_in(kubeconfig, configuration)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a file that anybody wrote breaks the client anywhere
            where = (
                f"{kubeconfig} is no kubeconfig" if kubeconfig else "this is no pod with a token"
            )
            why = " ".join(str(error).split())[:MAX_WHY]
            raise ConfigError(
                f"{where} ({why}); give --kubeconfig FILE, or let the pod mount its token"
            ) from None
        return cls(client.ApiClient(configuration).rest_client.pool_manager, configuration)

    def list(self) -> bytes:
        """Return the JSON of all policy objects, as they are in etcd now. Raises ApiError."""
        return self._read("GET", PATH)

    def probe(self) -> bytes:
        """Return the JSON of all policy objects' metadata, from the server's cache.

        Raises ApiError.
        """
        return self._read("GET", f"{PATH}?resourceVersion=0", accept=METADATA)

    def nodes(self) -> bytes:
        """Return the JSON of all nodes' metadata, from the server's cache. Raises ApiError."""
        return self._read("GET", NODES, accept=METADATA)

    def write_status(self, name: str, resource_version: str, status: Mapping[str, object]) -> None:
        """Write an object's status. Raises ApiError, 409 if the object has changed since."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        self._read("PATCH", f"{PATH}/{name}/status", body, content=MERGE)

    def create_event(self, event: Mapping[str, object]) -> None:
        """Create a Kubernetes event; one of that name is left as it is. Raises ApiError."""
        try:
            self._read("POST", EVENTS, event)
        except ApiError as error:
            if error.code != 409:
                raise

    def mark_leader(self, pod: str, leads: bool) -> None:
        """Set or remove the label of the leader on a pod NAMESPACE/NAME. Raises ApiError."""
        namespace, _, name = pod.partition("/")
        body = {"metadata": {"labels": {LEADER_LABEL: "true" if leads else None}}}
        # The right to a pod's status covers its labels, and never its spec.
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self._read("PATCH", path, body, content=MERGE)

    def placeholders(self, namespace: str) -> bytes:
        """Return the JSON of the metadata of running placeholder pods, as now. Raises ApiError."""
        chosen = f"labelSelector={JOB_LABEL}&fieldSelector=status.phase=Running"
        return self._read("GET", f"/api/v1/namespaces/{namespace}/pods?{chosen}", accept=METADATA)

    def advertise(self, node: str, number: int) -> None:
        """Write the number of guests that a node lends. Raises ApiError."""
        said = {RESOURCE: str(number)}
        body = {"metadata": {"labels": said}, "status": {"capacity": said, "allocatable": said}}
        self._read("PATCH", f"/api/v1/nodes/{node}/status", body, content=MERGE)

    def signing_requests(self, signer: str) -> bytes:
        """Return the JSON of all CertificateSigningRequests for a signer. Raises ApiError."""
        return self._read("GET", f"{REQUESTS}?fieldSelector=spec.signerName={signer}")

    def judge_request(self, name: str, verdict: str, why: str) -> None:
        """Set the condition Approved or Denied of a CertificateSigningRequest. Raises ApiError."""
        said = {"type": verdict, "status": "True", "reason": "RoseNode", "message": why[:MAX_WHY]}
        body = {"status": {"conditions": [said]}}
        self._read("PATCH", f"{REQUESTS}/{name}/approval", body, content=MERGE)

    def certify(self, name: str, certificate: str) -> None:
        """Write the certificate, PEM in base64, of an approved request. Raises ApiError."""
        body = {"status": {"certificate": certificate}}
        self._read("PATCH", f"{REQUESTS}/{name}/status", body, content=MERGE)

    def _read(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        accept: str = JSON,
        content: str = JSON,
    ) -> bytes:
        from urllib3 import Timeout

        headers = {"Accept": accept, "User-Agent": "rose-scheduler"}
        if body is not None:
            headers["Content-Type"] = content
        try:
            # This reads the token anew when it is a minute old.
            for each in self._configuration.auth_settings().values():
                headers[each["key"]] = each["value"]
            answer = self._pool.request(
                method,
                self._configuration.host + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=Timeout(connect=CONNECT_S, read=ANSWER_S),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            try:
                data: bytes = answer.read(MAX_BODY_BYTES, decode_content=True)
            finally:
                answer.release_conn()
        except Exception as error:
            # A program that the kubeconfig names for tokens may fail in any way.
            why = f"{type(error).__name__}: {error}"[:MAX_WHY]
            raise ApiError(0, f"the API server does not answer ({why})") from error
        if answer.status >= 300:
            raise _refusal(answer.status, path, data)
        if len(data) >= MAX_BODY_BYTES:
            raise ApiError(0, f"the API server's answer has more than {MAX_BODY_BYTES} bytes")
        return data


def _log_in(kubeconfig: Path, configuration: Any) -> None:  # noqa: ANN401 - of the client
    """Load the kubeconfig into the configuration, with the credentials of its login program.

    The client only logs a failed login and continues: the API server would be blamed for it. Raises
    ConfigError, and any error of the client.
    """
    from kubernetes import config

    files = str(kubeconfig).split(os.pathsep)
    if not any(os.path.exists(file) for file in files):
        raise ConfigError(f"{kubeconfig} is not there; give --kubeconfig FILE")
    merged = _plain(config.kube_config.KubeConfigMerger(str(kubeconfig)).config)
    context = _named(merged, "contexts", merged.get("current-context"))["context"]
    user: Mapping[str, Any] = {}
    if context.get("user"):
        user = _named(merged, "users", context["user"]).get("user") or {}
    program = user["exec"]["command"] if user.get("exec") else None
    beside = str(kubeconfig.parent / program) if program else ""
    if program and not (shutil.which(program) or shutil.which(beside)):
        raise ConfigError(f"{kubeconfig}: its login program {program} is not installed here")
    loaded: Future[None] = Future()

    def load() -> None:
        try:
            config.load_kube_config(
                str(kubeconfig), client_configuration=configuration, persist_config=False
            )
            loaded.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loaded.set_exception(error)

    # A daemon: a program that hangs does not keep the process from ending.
    threading.Thread(target=load, name="kubeconfig", daemon=True).start()
    try:
        loaded.result(LOGIN_S)
    except TimeoutError:
        raise ConfigError(
            f"{kubeconfig}: its login program {program} does not end within {LOGIN_S:g} s; run it"
            " by hand, it may ask for something"
        ) from None
    if program and not (configuration.api_key or configuration.cert_file):
        raise ConfigError(
            f"{kubeconfig}: its login program {program} gave no credentials; run it by hand"
        )


def _plain(node: Any) -> Any:  # noqa: ANN401 - dicts, lists and scalars in the client's wrappers
    value = getattr(node, "value", node)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _named(merged: Mapping[str, Any], kind: str, name: object) -> Mapping[str, Any]:
    for each in merged.get(kind) or ():
        if each["name"] == name:
            found: Mapping[str, Any] = each
            return found
    raise ValueError(f"it names {name!r}, which is none of its {kind}")


def _refusal(code: int, path: str, data: bytes) -> ApiError:
    """Return the error for an HTTP status of a refusal, with what an operator should do."""
    try:
        message = str(json.loads(data).get("message", ""))
    except (ValueError, AttributeError, RecursionError):  # it is a refusal, whatever is in it
        message = ""
    if code == 404 and path.partition("?")[0] == PATH:
        message = NO_DEFINITION
    elif code == 403:
        whose = "RELEASE-signer" if path.startswith(REQUESTS) else "RELEASE-controller"
        message = f"{message or 'not permitted'}; the chart's role {whose} has it"
    elif code == 401:
        message = "the API server does not know this token or certificate; renew it"
    return ApiError(code, (message or f"the API server answers {code}")[:MAX_WHY])
