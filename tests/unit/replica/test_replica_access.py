"""Routes of an engine's whole server, and the callers that reach each."""

from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from vllm.entrypoints.serve import register_vllm_dev_api_routers

from rose.replica.asgi import AccessFilter
from rose.replica.endpoint import ReplicaEndpoint
from tests.fakes.asgi_client import CONTROL, SECRET, exchange
from tests.fakes.async_llm import FakeAsyncLLM

OPEN = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/rose/v1/state"),
    ("POST", "/rose/v1/generate"),
    ("POST", "/rose/v2/generate"),
    ("POST", "/rose/v1/generate_batch"),
    ("POST", "/rose/v1/generate_batch/leave"),
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
async def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """A server with ROSE's routes and vLLM's own for development."""
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_REPLICA_SECRET", SECRET)
    app = FastAPI()
    register_vllm_dev_api_routers(app)
    endpoint = ReplicaEndpoint()
    endpoint.attach_router(app)
    await endpoint.init_state(FakeAsyncLLM(), app.state, Namespace(model="model"))
    return app


def reached(app: FastAPI, asked: set[tuple[str, str]]) -> AccessFilter:
    """The filter in front of a server that only notes what it was asked for."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        asked.add((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    del app
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
async def test_only_what_is_listed_is_reached(app: FastAPI, headers: dict[str, str]) -> None:
    asked = questions(app.router.routes)
    assert {path for _, path in asked} >= {"/collective_rpc", "/sleep", "/wake_up", "/server_info"}
    known: set[tuple[str, str]] = set()
    guarded = reached(app, known)
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
async def test_no_other_spelling_gets_by(app: FastAPI, path: str) -> None:
    for method in ("GET", "POST"):
        for headers in ({}, CONTROL):
            known: set[tuple[str, str]] = set()
            answer = await exchange(reached(app, known), path, b"{}", method, headers).done()
            assert (answer.status, known) == (404, set())


async def test_no_websocket_is_accepted(app: FastAPI) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await AccessFilter(app)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_an_engine_that_is_no_replica_is_left_alone(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "host")
    known: set[tuple[str, str]] = set()
    assert (await exchange(reached(app, known), "/tokenize", b"{}").done()).status == 204
    assert known == {("POST", "/tokenize")}
