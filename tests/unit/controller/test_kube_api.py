"""The controller's calls over HTTP: what they ask for, and what a refusal tells."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import urllib3

import rose.controller.kube_api
import rose.main.scheduler
from rose.controller.kube_api import METADATA, NO_DEFINITION, PATH, ApiError, KubeApi
from rose.errors import ConfigError
from rose.main.scheduler import _mark, main, settings_of
from tests.harness.waiting import PATIENCE_S, until_async


class Handler(BaseHTTPRequestHandler):
    """Answers as `answer` says: (code, chunks); None instead of a chunk cuts the connection."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[tuple[int, list[bytes | None]]] = (200, [])
    asked: ClassVar[list[tuple[str, str, dict[str, str], bytes]]] = []

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.asked.append((self.command, self.path, dict(self.headers), body))
        code, chunks = self.answer
        self.send_response(code)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            if chunk is None:
                self.close_connection = True
                return
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    do_PATCH = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class TokenConfiguration:
    """The client's configuration, with a token."""

    def __init__(self, host: str) -> None:
        self.host = host

    def auth_settings(self) -> dict[str, Any]:
        return {"BearerToken": {"key": "authorization", "value": "bearer t0ken"}}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def api(server: ThreadingHTTPServer) -> Iterator[KubeApi]:
    Handler.asked = []
    with urllib3.PoolManager() as pool:
        yield KubeApi(pool, TokenConfiguration(f"http://127.0.0.1:{server.server_port}"))


def answer(code: int, *chunks: bytes | None) -> None:
    Handler.answer = code, [*chunks]


def refusal(message: str) -> bytes:
    return json.dumps({"kind": "Status", "message": message}).encode()


def test_a_list_bears_the_token_and_is_whole(api: KubeApi) -> None:
    answer(200, b'{"items"', b": []}")
    assert api.list() == b'{"items": []}'
    [(method, path, headers, _)] = Handler.asked
    assert (method, path, headers["authorization"]) == ("GET", PATH, "bearer t0ken")


def test_a_probe_asks_for_metadata_from_the_servers_memory(api: KubeApi) -> None:
    answer(200, b"{}")
    api.probe()
    [(_, path, headers, _)] = Handler.asked
    assert path.endswith("?resourceVersion=0")
    assert headers["Accept"] == METADATA


def test_an_answer_that_breaks_off_is_none(api: KubeApi) -> None:
    answer(200, b"one", None)
    with pytest.raises(ApiError, match="does not answer"):
        api.list()


@pytest.mark.parametrize(
    ("code", "message", "said"),
    [
        (403, "cannot list resource", "cannot list resource; the chart's role RELEASE-controller"),
        (404, "not found", NO_DEFINITION),
        (401, "Unauthorized", "renew it"),
        (500, "etcdserver: request timed out", "etcdserver: request timed out"),
        (503, "", "the API server answers 503"),
    ],
)
def test_a_refusal_is_one_line_that_says_what_to_do(
    api: KubeApi, code: int, message: str, said: str
) -> None:
    answer(code, refusal(message))
    for call in (api.list, api.probe):
        with pytest.raises(ApiError) as caught:
            call()
        assert caught.value.code == code
        assert said in str(caught.value)


def test_a_status_is_written_only_to_the_object_that_was_judged(api: KubeApi) -> None:
    answer(200, b"{}")
    api.write_status("chat", "7", {"observedGeneration": 1})
    [(method, path, headers, body)] = Handler.asked
    assert (method, path) == ("PATCH", f"{PATH}/chat/status")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert json.loads(body) == {
        "metadata": {"resourceVersion": "7"},
        "status": {"observedGeneration": 1},
    }
    answer(404, refusal("chat not found"))
    with pytest.raises(ApiError, match="chat not found"):
        api.write_status("chat", "7", {})


def test_an_event_that_is_there_already_will_do(api: KubeApi) -> None:
    answer(409, refusal("already exists"))
    api.create_event({"metadata": {"name": "e"}})
    answer(403, refusal("cannot create events"))
    with pytest.raises(ApiError, match="cannot create events"):
        api.create_event({"metadata": {"name": "e"}})


def test_the_leader_is_a_label_that_leaves_a_pods_spec_alone(api: KubeApi) -> None:
    answer(200, b"{}")
    for leads, value in ((True, "true"), (False, None)):
        api.mark_leader("rose-system/rose-scheduler-x", leads)
        method, path, headers, body = Handler.asked.pop()
        assert method == "PATCH"
        assert path == "/api/v1/namespaces/rose-system/pods/rose-scheduler-x/status"
        assert headers["Content-Type"] == "application/merge-patch+json"
        # By RFC 7386 a null takes the label away.
        assert json.loads(body) == {"metadata": {"labels": {"rose.dev/leader": value}}}


async def test_a_scheduler_marks_its_pod_as_it_leads_and_asks_again_where_it_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Marked:
        def __init__(self) -> None:
            self.said: list[bool] = []

        def mark_leader(self, pod: str, leads: bool) -> None:
            assert pod == "ns/p"
            self.said.append(leads)
            if len(self.said) in (2, 3):
                raise ApiError(403, "cannot patch pods/status")

    class Handlers:
        leads = False

    class Events:
        said: ClassVar[list[str]] = []

        def write(self, event: str, **fields: object) -> None:
            self.said.append(event)

    monkeypatch.setattr(rose.main.scheduler, "MARK_S", 0.001)
    api, handlers, events = Marked(), Handlers(), Events()
    task = asyncio.create_task(_mark(api, "ns/p", handlers, events))  # type: ignore[arg-type]
    try:
        # A container of the same pod may have led and died: the first word is that it stands by.
        await until_async(lambda: api.said == [False], PATIENCE_S, "the pod is marked")
        handlers.leads = True
        await until_async(
            lambda: api.said == [False, True, True, True], PATIENCE_S, "the pod is marked"
        )
        handlers.leads = False
        await until_async(lambda: api.said[4:] == [False], PATIENCE_S, "the pod is marked")
    finally:
        task.cancel()
    assert events.said == ["leader_unmarked"], "a refusal is said once"


def test_a_pod_is_named_whole_and_only_where_its_api_server_is_asked() -> None:
    given = ["--store", "s.sqlite", "--log-dir", "."]
    assert settings_of([*given, "--kubernetes", "--pod", "ns/p"]).pod == "ns/p"
    for wrong in (
        ["--kubernetes", "--pod", "p"],
        ["--pod", "ns/p"],
        ["--kubeconfig", "config", "--pod", "ns/p"],
        ["--node-label", "pool"],
        ["--quota", "grpo=training"],
    ):
        with pytest.raises(ConfigError, match="give --pod NAMESPACE/NAME with --kubernetes"):
            settings_of([*given, *wrong])


def test_quotas_name_each_job_once_with_the_namespace_of_its_pods() -> None:
    given = ["--store", "s.sqlite", "--log-dir", ".", "--kubernetes"]
    named = ["--quota", "grpo_1.a=training", "--quota", "B=training"]
    assert settings_of([*given, *named]).quotas == {"grpo_1.a": "training", "B": "training"}
    for wrong in ("grpo", "=training", "grpo=", "a b=training", "a=Training", f"{'a' * 64}=t"):
        with pytest.raises(ConfigError, match="give JOB=NAMESPACE, once for each job"):
            settings_of([*given, "--quota", wrong])
    with pytest.raises(ConfigError, match="once for each job"):
        settings_of([*given, "--quota", "a=x", "--quota", "a=y"])


def test_running_placeholders_are_asked_for_and_what_is_lent_is_written(api: KubeApi) -> None:
    answer(200, b'{"items": []}')
    api.placeholders("training")
    method, path, headers, _ = Handler.asked.pop()
    assert (method, headers["Accept"]) == ("GET", METADATA)
    chosen = "labelSelector=rose.dev/job&fieldSelector=status.phase=Running"
    assert path == f"/api/v1/namespaces/training/pods?{chosen}"
    api.advertise("n0", 2)
    method, path, headers, body = Handler.asked.pop()
    assert (method, path) == ("PATCH", "/api/v1/nodes/n0/status")
    assert headers["Content-Type"] == "application/merge-patch+json"
    said = {"rose.dev/borrowed-gpu": "2"}
    status = {"capacity": said, "allocatable": said}
    assert json.loads(body) == {"metadata": {"labels": said}, "status": status}


def test_a_server_that_is_not_there_does_not_answer() -> None:
    with urllib3.PoolManager() as pool:
        api = KubeApi(pool, TokenConfiguration("http://127.0.0.1:1"))
        with pytest.raises(ApiError, match="does not answer"):
            api.list()


def test_without_the_client_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"rose-rollout\[kubernetes\]"):
        KubeApi.opened(tmp_path / "config")


def test_a_scheduler_without_the_client_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    store = str(tmp_path / "s.sqlite")
    assert main(["--store", store, "--log-dir", str(tmp_path), "--kubernetes"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rose scheduler: the Kubernetes client is not installed; pip install")


def test_what_is_no_kubeconfig_is_named(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    file = tmp_path / "config"
    for text in ("", "[]", "apiVersion: v1\nkind: Config\nclusters: []\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config is no kubeconfig .*; give --kubeconfig"):
            KubeApi.opened(file)
    file.write_text("users: [")
    with pytest.raises(ConfigError, match="is no kubeconfig") as broken:
        KubeApi.opened(file)
    assert "\n" not in str(broken.value)
    with pytest.raises(ConfigError, match="missing is not there"):
        KubeApi.opened(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no pod with a token"):
        KubeApi.opened(None)


LOGINS = {
    "user: {name: v, user: {}}": "it names 'u', which is none of its users",
    "user: {name: u, user: {exec: {apiVersion: v1, command: no-such-login}}}": "is not installed",
    "user: {name: u, user: {exec: {apiVersion: v1, command: 'false'}}}": "gave no credentials",
    "user: {name: u, user: {exec: {apiVersion: v1, command: tail, args: [-f, /dev/null]}}}": (
        "does not end within"
    ),
}


@pytest.mark.parametrize("login", LOGINS)
def test_a_login_that_gives_nothing_is_named_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setattr(rose.controller.kube_api, "LOGIN_S", 0.5)
    file = tmp_path / "config"
    file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "contexts: [{name: c, context: {cluster: k, user: u}}]\n"
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        f"users: [{login.removeprefix('user: ')}]\n"
    )
    with pytest.raises(ConfigError, match=LOGINS[login]):
        KubeApi.opened(file)
