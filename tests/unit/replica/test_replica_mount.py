"""The routes of a vLLM without endpoint plugins: mounted once, when the server starts."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from starlette.types import Message

import rose.replica.endpoint
from rose.replica.asgi import STATE_NAME, GenerateShortcut
from rose.replica.endpoint import EndpointMount, ReplicaEndpoint
from tests.fakes.asgi_client import exchange
from tests.fakes.async_llm import FakeAsyncLLM


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
