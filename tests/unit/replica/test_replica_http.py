"""The replica's routes: what each answers, who reaches it, and how they come into the server."""

import pytest

pytest.importorskip("vllm")

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.types import Message
from vllm.entrypoints.serve import register_vllm_dev_api_routers

import rose.replica.endpoint
from rose.replica.asgi import STATE_NAME, AccessFilter, GenerateShortcut
from rose.replica.endpoint import EndpointMount, ReplicaEndpoint
from rose.replica.engine_update import WeightUpdater
from tests.fakes.asgi_client import CONTROL, SECRET, exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM
from tests.fakes.weight_ranks import Served
from weight_transfer import WeightError, WrongBaseError

# ---- answers ----


TURN = {"request_id": "r", "token_ids": [1], "sampling": {"max_tokens": 8}}
REPORT = {
    "version": 4,
    "changed_elements": 1,
    "wire_bytes": 9,
    "pause_s": 0.1,
    "apply_s": 0.1,
    "digest_ok": True,
    "probe_ok": True,
    "probe_max_abs_diff": 0.0,
}
AUDIT = {"version": 4, "flipped": [], "unjudged": [], "weights": 2, "audit_s": 0.1}


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    monkeypatch.setenv("ROSE_REPLICA_ID", "d0")
    monkeypatch.setenv("ROSE_REPLICA_SECRET", SECRET)
    return await Served(FakeAsyncLLM()).start()


def fail_apply(replica: Served, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    async def apply(_: Any, manifest: str, chunks: str, on_update: str) -> Any:
        assert on_update == "recompute"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(WeightUpdater, "apply", apply)


@pytest.mark.parametrize("role", [None, "host"])
def test_the_plugin_is_inert_outside_a_replica(
    monkeypatch: pytest.MonkeyPatch, role: str | None
) -> None:
    if role is None:
        monkeypatch.delenv("ROSE_ROLE", raising=False)
    else:
        monkeypatch.setenv("ROSE_ROLE", role)
    app = FastAPI()
    before = len(app.router.routes)
    ReplicaEndpoint().attach_router(app)
    assert len(app.router.routes) == before


async def test_a_lease_opens_a_drain_closes_and_an_old_lease_does_nothing(
    replica: Served,
) -> None:
    assert (await replica.ask("generate", TURN))[0] == 503
    assert (await replica.ask("admit", {"epoch": 5}))[0] == 200
    turn = replica.begin("generate", TURN)
    await settle()
    replica.engine.step()
    await settle()
    assert await replica.state() == {
        "replica_id": "d0",
        "role": "dedicated",
        "policy_version": 0,
        "proven": True,
        "admitting": True,
        "epoch": 5,
        "running": 1,
        "waiting": 0,
        "tokens_total": 1,
        "kv_tokens": 128,
        "warm": True,
        "warm_up": {"failed": False, "said": "no warm-up was asked for"},
        "job": "",
        "adapters": {},
    }
    assert (await replica.ask("drain", {"epoch": 4, "reason": "old"}))[0] == 409
    assert (await replica.ask("admit", {"epoch": 4}))[0] == 409
    assert await replica.ask("drain", {"epoch": 5, "reason": "busy"}) == (200, {"aborted": 1})
    assert (await turn.done()).lines[-1] == {"finish_reason": "revoked"}
    assert not (await replica.state())["admitting"]
    assert (await replica.ask("drain", {"reason": 1}))[0] == 400


async def test_a_turn_of_another_job_than_the_leases_or_the_weights_is_not_begun(
    replica: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await replica.ask("admit", {"epoch": 1, "job": "a"}))[0] == 200
    assert (await replica.ask("generate", {**TURN, "job": "b"}))[0] == 503
    monkeypatch.setattr(replica.endpoint._weights, "job", "b")
    # Its lease is here, and another job's weights still are.
    assert (await replica.ask("generate", {**TURN, "job": "a"}))[0] == 503
    assert (await replica.state())["job"] == "b"
    monkeypatch.setattr(replica.endpoint._weights, "job", "a")
    turn = replica.begin("generate", {**TURN, "job": "a"})
    await settle()
    replica.engine.step()
    await settle()
    assert (await replica.state())["running"] == 1
    await replica.ask("drain", {"epoch": 1})
    await turn.done()


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (REPORT, 200),
        (WrongBaseError("based on 7"), 409),
        (WeightError("a chunk is damaged"), 422),
    ],
)
async def test_a_version_that_is_refused_leaves_the_replica_open(
    replica: Served,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Any,
    status: int,
) -> None:
    await replica.ask("admit", {"epoch": 1})
    fail_apply(replica, monkeypatch, outcome)
    assert (await replica.ask("weights/apply", {"manifest": "m", "chunks": "c"}))[0] == status
    assert (await replica.state())["admitting"]
    assert (await replica.ask("admit", {"epoch": 2}))[0] == 200


@pytest.mark.parametrize(
    ("outcome", "status", "still_admitting"),
    [
        (AUDIT, 200, True),
        (AUDIT | {"flipped": ["lm_head.weight"]}, 422, False),
        (WeightError("versions change too fast"), 503, True),
    ],
)
async def test_a_flipped_weight_closes_the_replica(
    replica: Served,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Any,
    status: int,
    still_admitting: bool,
) -> None:
    async def audit(_: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(WeightUpdater, "audit", audit)
    await replica.ask("admit", {"epoch": 1})
    turn = replica.begin("generate", TURN)
    await settle()
    replica.engine.step()
    assert (await replica.ask("weights/audit", b""))[0] == status
    assert (await replica.state())["admitting"] is still_admitting
    if not still_admitting:
        assert (await turn.done()).lines[-1] == {"finish_reason": "revoked"}
    turn.leave()


async def test_an_unknown_way_to_update_is_refused(replica: Served) -> None:
    body = {"manifest": "m", "chunks": "c", "on_update": "whenever"}
    assert (await replica.ask("weights/apply", body))[0] == 400


@pytest.mark.parametrize("shortcut", [False, True])
async def test_a_turn_passes_the_servers_middleware_only_with_the_shortcut(
    replica: Served, shortcut: bool
) -> None:
    seen: list[str] = []

    class FakeMetrics:
        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await self._app(scope, receive, send)

    replica.app.add_middleware(FakeMetrics)
    if shortcut:
        replica.app.add_middleware(GenerateShortcut)
    assert (await replica.ask("generate", TURN))[0] == 503, "served by the endpoint either way"
    assert (await replica.ask("admit", {"epoch": 1}))[0] == 200
    turn = ["/rose/v1/generate"] if not shortcut else []
    assert seen == [*turn, "/rose/v1/admit"]


@pytest.mark.parametrize(
    "said", [{}, {"Authorization": "Bearer "}, {"Authorization": f"Basic {SECRET}"}]
)
@pytest.mark.parametrize("path", ["admit", "drain", "weights/apply", "weights/audit"])
async def test_control_is_for_who_bears_the_secret(
    replica: Served, path: str, said: dict[str, str]
) -> None:
    replica.headers = said
    status, answer = await replica.ask(path, {"epoch": 1, "chunks": "c"})
    assert (status, answer["error"]["type"]) == (401, "no_secret")
    state = await replica.state()
    assert (state["admitting"], state["epoch"]) == (False, 0)


async def test_an_engine_without_a_secret_is_controlled_by_nobody(
    replica: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_REPLICA_SECRET")
    replica.headers = {"Authorization": "Bearer "}
    assert (await replica.ask("admit", {"epoch": 1}))[0] == 401


async def test_an_epoch_that_no_lease_can_have_changes_nothing(replica: Served) -> None:
    for epoch in (-1, 1 << 62, 1 << 70, 1.5, "1", None):
        assert (await replica.ask("admit", {"epoch": epoch}))[0] == 400
    assert (await replica.ask("admit", {"epoch": 1 << 40}))[0] == 200, "leases outlive engines"
    for path in ("admit", "drain"):
        assert (await replica.ask(path, {"epoch": (1 << 40) + (1 << 42) + 1}))[0] == 400
    assert (await replica.ask("admit", {"epoch": (1 << 40) + 1}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("admit", b'{"epoch":1,"reason":"' + b"x" * (300 << 10) + b'"}', 413),
        ("generate", b" " * (5 << 20), 413),
        ("admit", b"[" * 100_000, 400),
        ("generate", b'{"request_id":' + b"[" * 100_000, 400),
        ("drain", b'{"epoch":1,"reason":"\xff"}', 400),
        ("weights/apply", b'{"chunks":"c","manifests":[1]}', 400),
        ("generate", TURN | {"token_ids": [-1]}, 400),
        ("generate", TURN | {"token_ids": [1 << 40]}, 400),
        ("generate", TURN | {"priority": 1 << 70}, 400),
        ("generate", TURN | {"sampling": {"seed": 1 << 64}}, 400),
        ("generate", TURN | {"sampling": {"temperature": -1}}, 400),
        ("generate", TURN | {"sampling": {"top_p": 0}}, 400),
        ("generate", TURN | {"sampling": {"max_tokens": -1}}, 400),
    ],
)
async def test_what_no_caller_may_send_is_refused(
    replica: Served, path: str, body: object, status: int
) -> None:
    await replica.ask("admit", {"epoch": 1})
    assert (await replica.ask(path, body))[0] == status


# ---- callers ----


OPEN = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/rose/v1/state"),
    ("POST", "/rose/v1/generate"),
    ("POST", "/rose/v1/generate_batch"),
    ("POST", "/rose/v1/generate_batch/leave"),
    ("POST", "/rose/v1/images"),
}
CONTROLLED = {
    ("POST", "/rose/v1/admit"),
    ("POST", "/rose/v1/drain"),
    ("POST", "/rose/v1/weights/apply"),
    ("POST", "/rose/v1/weights/audit"),
    ("POST", "/sleep"),
    ("POST", "/v1/completions"),
}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """A server with ROSE's routes and vLLM's own for development."""
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_REPLICA_SECRET", SECRET)
    app = FastAPI()
    register_vllm_dev_api_routers(app)
    endpoint = ReplicaEndpoint()
    endpoint.attach_router(app)
    await endpoint.init_state(FakeAsyncLLM(), app.state, Namespace(model="model"))
    return app


def reached(asked: set[tuple[str, str]]) -> AccessFilter:
    """The filter in front of a server that only notes what it was asked for."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        asked.add((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return AccessFilter(noting)


def questions(routes: list[BaseRoute]) -> set[tuple[str, str]]:
    found = {
        (method, path)
        for route in routes
        if (path := getattr(route, "path", "")) and isinstance(route, Route)
        for method in ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE"]
    }
    return found | OPEN | CONTROLLED


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guess"}, CONTROL])
async def test_only_what_is_listed_is_reached(server: FastAPI, headers: dict[str, str]) -> None:
    asked = questions(server.router.routes)
    assert {path for _, path in asked} >= {"/collective_rpc", "/sleep", "/wake_up", "/server_info"}
    known: set[tuple[str, str]] = set()
    guarded = reached(known)
    refused = {}
    for method, path in asked:
        answer = await exchange(guarded, path, b"{}", method, headers).done()
        refused[method, path] = answer.status
    bears = headers == CONTROL
    assert known == (OPEN | CONTROLLED if bears else OPEN)
    assert {refused[question] for question in CONTROLLED} == ({204} if bears else {401})
    assert {refused[question] for question in asked - OPEN - CONTROLLED} == {404}


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc/",
        "//collective_rpc",
        "/health/../collective_rpc",
        "/rose/v1/state/../../../collective_rpc",
        "/health/",
        "/HEALTH",
        "",
        "*",
        "http://x/collective_rpc",
        "/v1/completions;x",
    ],
)
async def test_no_other_spelling_gets_by(server: FastAPI, path: str) -> None:
    for method in ("GET", "POST"):
        for headers in ({}, CONTROL):
            known: set[tuple[str, str]] = set()
            answer = await exchange(reached(known), path, b"{}", method, headers).done()
            assert (answer.status, known) == (404, set())


async def test_no_websocket_is_accepted(server: FastAPI) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await AccessFilter(server)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_an_engine_that_is_no_replica_is_left_alone(
    server: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "host")
    known: set[tuple[str, str]] = set()
    assert (await exchange(reached(known), "/tokenize", b"{}").done()).status == 204
    assert known == {("POST", "/tokenize")}


# ---- a vLLM without endpoint plugins ----


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """Return the app that vLLM 0.25 has before it serves."""
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    app = FastAPI()
    app.state.engine_client = FakeAsyncLLM()
    app.state.args = Namespace(model="model")
    app.add_middleware(EndpointMount)
    app.add_middleware(GenerateShortcut)
    return app


async def start(app: FastAPI) -> list[Message]:
    """Return the answers to the server at its start, and at its end."""
    said: list[Message] = []
    asked: Iterator[Message] = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Message:
        return next(asked)

    async def send(message: Message) -> None:
        said.append(message)

    await app({"type": "lifespan"}, receive, send)
    return said


async def test_the_endpoint_is_there_from_the_first_request_on(app: FastAPI) -> None:
    assert [message["type"] for message in await start(app)] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    state = await exchange(app, "/rose/v1/state", b"", "GET").done()
    assert (state.status, state.json["role"]) == (200, "dedicated")
    turn = await exchange(app, "/rose/v1/generate", {"request_id": "r", "token_ids": [1]}).done()
    assert (turn.status, turn.json["error"]["type"]) == (503, "draining")
    routes = len(app.router.routes)
    await start(app)
    assert len(app.router.routes) == routes, "it is mounted once"


async def test_a_vllm_that_loads_the_plugin_keeps_the_plugins_endpoint(app: FastAPI) -> None:
    plugin = ReplicaEndpoint()
    plugin.attach_router(app)
    await plugin.init_state(app.state.engine_client, app.state, app.state.args)
    before, routes = getattr(app.state, STATE_NAME), len(app.router.routes)
    await start(app)
    assert getattr(app.state, STATE_NAME) is before
    assert len(app.router.routes) == routes


async def test_a_server_without_a_role_is_left_alone(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_ROLE")
    await start(app)
    assert (await exchange(app, "/rose/v1/state", b"", "GET").done()).status == 404


async def test_a_server_whose_endpoint_cannot_be_mounted_does_not_start(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untested(*_: Any) -> None:
        raise RuntimeError("ROSE is not tested with vLLM 0.26.0")

    monkeypatch.setattr(rose.replica.endpoint.ReplicaEndpoint, "attach_router", untested)
    assert await start(app) == [
        {"type": "lifespan.startup.failed", "message": "ROSE is not tested with vLLM 0.26.0"}
    ]
