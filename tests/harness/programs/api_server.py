"""A real API server for tests: calls to it, and the processes behind it where they may be killed.

ROSE_KUBECONFIG names the file by which an administrator reaches one that may be written to: of
envtest, kind, or any that serves core types and RBAC. ROSE_KUBE_RUN names a folder with NAME.pid of
each of its processes, where they run on this machine and may be killed.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from elastic_scheduler.capacity import crd
from elastic_scheduler.capacity.crd import GROUP, VERSION
from tests.harness.waiting import until

Object = dict[str, Any]
KUBECONFIG: Final = os.environ.get("ROSE_KUBECONFIG", "")
RUN: Final = os.environ.get("ROSE_KUBE_RUN", "")
MARKS: Final = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not KUBECONFIG, reason="ROSE_KUBECONFIG names no API server"),
]
needs_processes: Final = pytest.mark.skipif(
    not RUN, reason="ROSE_KUBE_RUN names no processes of an API server"
)
POLL_S: Final = 0.2
DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"


class ApiClient:
    """Speaks JSON to the server of a kubeconfig that has a client's certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        said = yaml.safe_load(kubeconfig.read_text())
        cluster, user = said["clusters"][0]["cluster"], said["users"][0]["user"]
        self.url, self.ca = cluster["server"], cluster["certificate-authority"]
        self._tls = ssl.create_default_context(cafile=self.ca)
        self._tls.load_cert_chain(user["client-certificate"], user["client-key"])

    def call(
        self,
        path: str,
        method: str = "GET",
        body: Object | None = None,
        *,
        kind: str = "application/json",
    ) -> Object:
        """Return its answer. Raises `HTTPError` for a refusal."""
        request = urllib.request.Request(
            self.url + path,
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

    def resources(self, group_version: str) -> dict[str, Object]:
        """Resources of `v1` or `GROUP/VERSION` by kind; none where that is not served."""
        path = f"/apis/{group_version}" if "/" in group_version else f"/api/{group_version}"
        found = self.call(path)["resources"] if self.has(path) else []
        return {each["kind"]: each for each in found if "/" not in each["name"]}

    def serves(self, group_version: str, kind: str) -> bool:
        return kind in self.resources(group_version)

    def create(self, path: str, body: Object) -> None:
        """Have it there, as it is or was."""
        try:
            self.call(path, "POST", body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def delete(self, path: str) -> None:
        """Have it not there."""
        try:
            self.call(path, "DELETE")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    def have_definition(self) -> None:
        """Have RoseCapacityPolicy served, as the code says it."""
        group = f"/apis/{GROUP}/{VERSION}"
        if not self.has(group):
            self.create(DEFINITIONS, crd())
            until(lambda: self.has(group), 30, "the definition is served", every_s=POLL_S)


def definitions_server() -> ApiClient:
    """Return the server that takes definitions: a newer one beside an old server."""
    beside = Path(RUN) / "kubeconfig-crds"
    return ApiClient(beside if RUN and beside.exists() else Path(KUBECONFIG))


def refusal(error: urllib.error.HTTPError) -> str:
    """Return the reason of a refused call."""
    return str(json.loads(error.read()).get("message", ""))


class Cut:
    """A way to the API server that is cut as it is when the server is killed."""

    def __init__(self, server: ApiClient) -> None:
        host, _, port = server.url.removeprefix("https://").partition(":")
        self._to = host, int(port or 443)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.open = True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and take no others."""
        self.open = False
        pairs, self._pairs = self._pairs, []
        for each in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.open:
                    near.close()
                    continue
                far = socket.create_connection(self._to)
                self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def kubeconfig(server: ApiClient, folder: Path, url: str = "", token: str = "") -> Path:
    """A file for the same user at another address, or for the bearer of a token."""
    said = yaml.safe_load(Path(KUBECONFIG).read_text())
    if url:
        said["clusters"][0]["cluster"]["server"] = url
    if token:
        said["users"][0]["user"] = {"token": token}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(said))
    return file


class ApiServerProcess:
    """A process of the API server's, which is killed and started again as it was."""

    def __init__(self, name: str) -> None:
        self._file = Path(RUN) / f"{name}.pid"
        self._log = Path(RUN) / f"{name}.log"
        pid = int(self._file.read_text())
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
        self._command = said.decode().rstrip("\0").split("\0")
        self._folder = Path(f"/proc/{pid}/cwd").readlink()
        self._child: subprocess.Popen[bytes] | None = None

    def flag(self, name: str) -> str:
        """The value of a flag, as `--name VALUE` or `--name=VALUE`."""
        for here, word in enumerate(self._command):
            if word == f"--{name}":
                return self._command[here + 1]
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
        raise LookupError(name)

    def kill(self) -> None:
        """With SIGKILL."""
        pid = int(self._file.read_text())
        os.kill(pid, signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
        until(lambda: not _lives(pid), 10, "it is gone", every_s=0.02)

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        self._file.write_text(str(self._child.pid))


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def compact() -> None:
    """Have etcd forget everything but what is there now."""
    endpoint = ApiServerProcess("etcd").flag("listen-client-urls")
    revision = _asked(f"{endpoint}/v3/maintenance/status", {})["header"]["revision"]
    try:
        _asked(f"{endpoint}/v3/kv/compaction", {"revision": revision})
    except AssertionError as error:
        # Nothing was written since it was done last.
        if "has been compacted" not in str(error):
            raise


def _asked(url: str, body: Object) -> Object:
    """Return etcd's answer over HTTP, which needs no program."""
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code}: {error.read().decode()}") from error
