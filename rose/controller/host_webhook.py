"""Mutating webhook that makes pods with the label `rose.dev/host: enabled` ROSE hosts.

    pod as created ── admission review ──> answered ──> JSON patch: the plugin by an init container,
                                               └──> a warning, and the pod as it is

`with_rose` decides, and has no IO. No pod is refused: one that cannot become a host serves without
ROSE, and so does every pod while this server is down (failurePolicy Ignore).
"""

import base64
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from executor.control_page.page import PAGE_GROUP
from executor.engine_settings import HOST
from rose.errors import RefusedError
from rose.process.background_tasks import stop_signalled
from rose.process.http_port import HttpPort
from rose.security.certificates import CertificateFiles

LABEL: Final = "rose.dev/host"
PATH: Final = "/hosts"
PLUGIN: Final = "rose-plugin"
"""Name of the volume with the plugin, and of the init container that fills it."""
PLUGIN_FOLDER: Final = "/rose-plugin"
SHARED: Final = "rose-host"
"""Name of the volume that host and node daemon share."""
CONTAINERS: Final = (f"{LABEL}-container", "kubectl.kubernetes.io/default-container")
"""Annotations that name the engine's container; the first one that is set counts."""
TARGETS: Final = {
    "ROSE_SLO_TTFT_S": "rose.dev/slo-ttft-s",
    "ROSE_SLO_TPOT_S": "rose.dev/slo-tpot-s",
}
ENTRY_POINT: Final = "rose_host"
MAX_REVIEW_BYTES: Final = 8 << 20
MAX_WARNING_CHARS: Final = 250
# Requests equal limits: a pod of the class Guaranteed stays one.
RESOURCES: Final = {"cpu": "500m", "memory": "256Mi"}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostPods:
    """Settings of the pods that become hosts.

    image: image of ROSE, which has the plugin. folder: shared folder, on the machine and in pods.
    group: number of the group that hosts and node daemons share.
    """

    image: str
    pull_policy: str = "IfNotPresent"
    folder: str = "/run/rose"
    group: int = 10_777


def with_rose(pod: Mapping[str, Any], settings: HostPods) -> Object:
    """Return the pod's spec as that of a ROSE host; unchanged if ROSE is in the pod already.

    Raises RefusedError for a pod that cannot become a host by these changes.
    """
    spec: Object = copy.deepcopy(pod["spec"])
    every = [*(spec.get("initContainers") or ()), *spec["containers"]]
    named = {each["name"] for each in (*every, *(spec.get("volumes") or ()))}
    if named & {PLUGIN, SHARED} or any("ROSE_ROLE" in _variables(each) for each in every):
        return spec
    annotations = pod["metadata"].get("annotations") or {}
    engine = _engine_container(spec["containers"], annotations)
    _mount(engine, {"name": PLUGIN, "mountPath": PLUGIN_FOLDER, "readOnly": True})
    _mount(engine, {"name": SHARED, "mountPath": settings.folder})
    _extend(engine, "PYTHONPATH", f"{PLUGIN_FOLDER}:{{}}", PLUGIN_FOLDER)
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        _extend(engine, name, f"{{}},{ENTRY_POINT}")
    wanted: Object = {
        "ROSE_ROLE": HOST,
        "ROSE_HOST_DIR": settings.folder,
        PAGE_GROUP: str(settings.group),
        **{name: annotations[key] for name, key in TARGETS.items() if key in annotations},
    }
    env = [{"name": name, "value": value} for name, value in wanted.items()]
    # Not the host name: with hostNetwork, or a name of the chart's, several pods have the same one.
    own_name = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}
    env.append({"name": "ROSE_HOST_NAME", "valueFrom": own_name})
    given = _variables(engine)
    _list(engine, "env").extend(each for each in env if each["name"] not in given)
    _list(spec, "volumes").extend(
        [
            {"name": PLUGIN, "emptyDir": {"sizeLimit": "64Mi"}},
            {"name": SHARED, "hostPath": {"path": settings.folder}},
        ]
    )
    _list(spec, "initContainers").append(_init_container(settings))
    groups = _list(spec.setdefault("securityContext", {}), "supplementalGroups")
    if settings.group not in groups:
        groups.append(settings.group)
    return spec


def _init_container(settings: HostPods) -> Object:
    return {
        "name": PLUGIN,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["rose", "plugin", "copy", PLUGIN_FOLDER],
        "resources": {"requests": {**RESOURCES}, "limits": {**RESOURCES}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65_532,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": PLUGIN, "mountPath": PLUGIN_FOLDER}],
    }


def _engine_container(containers: list[Object], annotations: Mapping[str, str]) -> Object:
    key = next((key for key in CONTAINERS if key in annotations), None)
    if key is None:
        return containers[0]
    for each in containers:
        if each["name"] == annotations[key]:
            return each
    names = ", ".join(each["name"] for each in containers)
    raise RefusedError(f"{key} names {annotations[key]!r}, and its containers are {names}")


def _mount(container: Object, mount: Object) -> None:
    mounts = _list(container, "volumeMounts")
    if any(each["mountPath"].rstrip("/") == mount["mountPath"] for each in mounts):
        raise RefusedError(f"container {container['name']} has a volume at {mount['mountPath']}")
    mounts.append(mount)


def _extend(container: Object, name: str, form: str, default: str | None = None) -> None:
    """Put the variable's value into `form`; set a missing one to `default`, or leave it out."""
    found = _variables(container).get(name)
    if found is None:
        if default is not None:
            _list(container, "env").append({"name": name, "value": default})
        return
    if "valueFrom" in found:
        raise RefusedError(f"{name} of container {container['name']} comes from elsewhere")
    found["value"] = form.format(found["value"]) if found.get("value") else default or ENTRY_POINT


def _variables(container: Mapping[str, Any]) -> dict[str, Object]:
    return {each["name"]: each for each in container.get("env") or ()}


def _list(parent: Object, key: str) -> list[Any]:
    """Return the list at `key`, which is made where there is none."""
    found: list[Any] = parent.get(key) or []
    parent[key] = found
    return found


def answered(review: Mapping[str, Any], settings: HostPods) -> Object:
    """Return the AdmissionReview that answers a review of a pod's creation.

    Raises LookupError, TypeError or AttributeError for what is not such a review.
    """
    request = review["request"]
    response: Object = {"uid": request["uid"], "allowed": True}
    before = request["object"]["spec"]
    try:
        after = with_rose(request["object"], settings)
    except RefusedError as error:
        response["warnings"] = [f"not a host of ROSE: {error}"[:MAX_WARNING_CHARS]]
    else:
        # "add" of a field that is there replaces it (RFC 6902, 4.1).
        patch = [
            {"op": "add", "path": f"/spec/{key}", "value": value}
            for key, value in after.items()
            if value != before.get(key)
        ]
        if patch:
            text = base64.b64encode(json.dumps(patch).encode()).decode()
            response.update(patchType="JSONPatch", patch=text)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def application(settings: HostPods, say: Callable[[str], object]) -> web.Application:
    """Return the webhook's HTTP application; `say` gets a line for each pod."""

    async def answer(http: web.Request) -> web.Response:
        try:
            review = await http.json()
            made = answered(review, settings)
            metadata = review["request"]["object"]["metadata"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise web.HTTPBadRequest(text="post an AdmissionReview of a pod\n") from error
        name = metadata.get("name") or metadata.get("generateName", "")
        response = made["response"]
        outcome = "a host of ROSE" if "patch" in response else "has ROSE already"
        outcome = next(iter(response.get("warnings", ())), outcome)
        say(f"{review['request'].get('namespace', '')}/{name}: {outcome}")
        return web.json_response(made)

    app = web.Application(client_max_size=MAX_REVIEW_BYTES)
    app.router.add_post(PATH, answer)
    return app


async def serve(
    settings: HostPods,
    host: str,
    port: int,
    certificates: CertificateFiles,
    say: Callable[[str], object],
) -> None:
    """Answer reviews over TLS until SIGTERM or SIGINT. Raises ConfigError if it cannot listen."""
    stop = stop_signalled()
    # The API server shows no certificate; this server knows no secret, and changes nothing itself.
    tls = certificates.server_context(everybody=True)
    listening = HttpPort(application(settings, say), host, port, tls)
    await listening.start()
    try:
        say(f"listening on https://{host}:{listening.port}{PATH}")
        await stop.wait()
    finally:
        await listening.close()
