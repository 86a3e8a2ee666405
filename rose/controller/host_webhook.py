"""Mutating webhook that makes pods with the label `rose.dev/host: enabled` ROSE hosts.

    pod as created ── admission review ──> answered ──> JSON patch: the plugin by an init container,
                                               └──> a warning, and the pod as it is

`with_rose` decides, and has no IO. No pod is refused: one that cannot become a host serves without
ROSE, and so does every pod while this server is down (failurePolicy Ignore).
"""

import base64
import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from executor.control_page.page import PAGE_GROUP
from executor.engine_settings import HOST
from rose.errors import RefusedError
from rose.process.background_tasks import stop_signalled
from rose.process.http_port import HttpPort

LABEL: Final = "rose.dev/host"
PATH: Final = "/hosts"
# The volume with the plugin and the init container that fills it, and the folder shared with nodes.
PLUGIN, PLUGIN_FOLDER, SHARED = "rose-plugin", "/rose-plugin", "rose-host"
# The first annotation that is set names the engine's container.
CONTAINERS: Final = (f"{LABEL}-container", "kubectl.kubernetes.io/default-container")
TARGETS: Final = {
    "ROSE_SLO_TTFT_S": "rose.dev/slo-ttft-s",
    "ROSE_SLO_TPOT_S": "rose.dev/slo-tpot-s",
}
# Variables that name a host: its pod's name alone is another's in another namespace.
NAMED_BY: Final = {"ROSE_POD_NAMESPACE": "metadata.namespace", "ROSE_POD_NAME": "metadata.name"}
MAX_REVIEW_BYTES: Final = 8 << 20
MAX_WARNING_CHARS: Final = 250
# Requests equal limits: a pod of the class Guaranteed stays one.
RESOURCES: Final = {"cpu": "500m", "memory": "256Mi"}

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostPods:
    """Settings of pods that become hosts: ROSE's image, and the folder and group of nodes."""

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
    plugin, shared = _mount(PLUGIN, PLUGIN_FOLDER), _mount(SHARED, settings.folder)
    for mount in (plugin | {"readOnly": True}, shared):
        mounts = _list(engine, "volumeMounts")
        if any(each["mountPath"].rstrip("/") == mount["mountPath"] for each in mounts):
            raise RefusedError(f"container {engine['name']} has a volume at {mount['mountPath']}")
        mounts.append(mount)
    _extend(engine, "PYTHONPATH", f"{PLUGIN_FOLDER}:{{}}", PLUGIN_FOLDER)
    _extend(engine, "VLLM_PLUGINS", "{},rose_host")
    _extend(engine, "SGLANG_PLUGINS", "{},rose_host")
    said = {"ROSE_ROLE": HOST, "ROSE_HOST_DIR": settings.folder, PAGE_GROUP: str(settings.group)}
    said |= {n: _seconds(key, annotations[key]) for n, key in TARGETS.items() if key in annotations}
    # Not the host name: with hostNetwork, or a name of the chart's, several pods have the same one.
    added: list[Object] = [{"name": n, "valueFrom": _field(of)} for n, of in NAMED_BY.items()]
    said["ROSE_HOST_NAME"] = ".".join(f"$({name})" for name in NAMED_BY)
    added += [{"name": name, "value": value} for name, value in said.items()]
    given = _variables(engine)
    _list(engine, "env").extend(each for each in added if each["name"] not in given)
    _list(spec, "volumes").append({"name": PLUGIN, "emptyDir": {"sizeLimit": "64Mi"}})
    _list(spec, "volumes").append({"name": SHARED, "hostPath": {"path": settings.folder}})
    _list(spec, "initContainers").append(_init_container(settings, plugin))
    groups = _list(spec.setdefault("securityContext", {}), "supplementalGroups")
    groups.extend({settings.group} - {*groups})
    return spec


def _init_container(settings: HostPods, mount: Object) -> Object:
    return {
        "name": PLUGIN,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["rose", "plugin", "copy", PLUGIN_FOLDER],
        "resources": {"requests": {**RESOURCES}, "limits": {**RESOURCES}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65_532,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [mount],
    }


def _engine_container(containers: list[Object], annotations: Mapping[str, str]) -> Object:
    key = next((key for key in CONTAINERS if key in annotations), "")
    for each in containers:
        if not key or each["name"] == annotations[key]:
            return each
    names = ", ".join(each["name"] for each in containers)
    raise RefusedError(f"{key} names {annotations.get(key)!r}, and its containers are {names}")


def _seconds(key: str, text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", text):
        raise RefusedError(f"{key} is {text!r:.40}; give seconds")
    return text


def _field(path: str) -> Object:
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}


def _mount(name: str, path: str) -> Object:
    return {"name": name, "mountPath": path}


def _extend(container: Object, name: str, form: str, default: str = "") -> None:
    """Put the variable's value into `form`; a missing one becomes the default, if there is one."""
    found = _variables(container).get(name)
    if found is None and default:
        _list(container, "env").append({"name": name, "value": default})
    elif found is not None and "valueFrom" in found:
        raise RefusedError(f"{name} of container {container['name']} comes from elsewhere")
    elif found is not None:
        value = found.get("value") or ""
        found["value"] = form.format(value) if value or not default else default


def _variables(container: Mapping[str, Any]) -> dict[str, Object]:
    return {each["name"]: each for each in container.get("env") or ()}


def _list(parent: Object, key: str) -> list[Any]:
    """Return the list at `key`, after making one if there is none."""
    parent[key] = parent.get(key) or []
    return parent[key]  # type: ignore[no-any-return]


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
        changed = {key: value for key, value in after.items() if value != before.get(key)}
        # "add" of a field that is there replaces it (RFC 6902, 4.1).
        patch = [{"op": "add", "path": f"/spec/{key}", "value": changed[key]} for key in changed]
        if patch:
            text = base64.b64encode(json.dumps(patch).encode()).decode()
            response.update(patchType="JSONPatch", patch=text)
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def application(settings: HostPods, say: Callable[[str], object]) -> web.Application:
    """Return the webhook's HTTP application; `say` gets a line for each pod."""

    async def answer(http: web.Request) -> web.Response:
        try:
            review = await http.json()
            made, request = answered(review, settings), review["request"]
            metadata = request["object"]["metadata"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise web.HTTPBadRequest(text="post an AdmissionReview of a pod\n") from error
        outcome = "a host of ROSE" if "patch" in made["response"] else "has ROSE already"
        outcome = made["response"].get("warnings", [outcome])[0]
        name = metadata.get("name") or metadata.get("generateName")
        say(f"{request.get('namespace')}/{name}: {outcome}")
        return web.json_response(made)

    app = web.Application(client_max_size=MAX_REVIEW_BYTES)
    app.router.add_post(PATH, answer)
    return app


async def serve(port: HttpPort, say: Callable[[str], object]) -> None:
    """Answer reviews until SIGTERM or SIGINT. Raises ConfigError if it cannot listen."""
    stop = stop_signalled()
    await port.start()
    say(f"listening on port {port.port}")
    await stop.wait()
    await port.close()
