"""A front in this process, a publisher that notes what it is given, and folders of checkpoints."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.errors import NotAnnouncedError, RoseError
from rose.integrations.front.checkpoint_folder import WeightRoots
from rose.integrations.front.settings import FrontSettings
from rose.integrations.named_weights import Named
from rose.main.front import listening
from tests.harness.policies import trainer_settings


def save_checkpoint(
    folder: Path, value: int = 1, name: str = "model.safetensors", tensor: str = "weight"
) -> Path:
    """Write a file of one tensor: four numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    data = np.full(4, value, np.float32).tobytes()
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, len(data)]}
    head = json.dumps({tensor: entry}).encode()
    (folder / name).write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder


class StandInPublisher:
    """Counts versions; `fails` is raised once, `held` keeps publications until it is set."""

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self.events: list[str] = []
        self.fails: RoseError | None = None
        self.unserved: RoseError | None = None
        self.held = threading.Event()
        self.held.set()
        self.running = 0
        self.most = 0

    @property
    def version(self) -> int:
        return self._version

    def publish(self, named: Named, *, wait: bool = True) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            assert self.held.wait(30)
            failed, self.fails = self.fails, None
            if failed is not None and not isinstance(failed, NotAnnouncedError):
                raise failed
            self._version += 1
            self.events.append(f"published {self._version}")
            if failed is not None:
                raise failed
            return self._version
        finally:
            self.running -= 1

    def wait_served(self, version: int, replicas: int | None = None) -> None:
        failed, self.unserved = self.unserved, None
        if failed is not None:
            raise failed
        self.events.append(f"served {version}")


class Gateway(Protocol):
    """Gateway behind a front."""

    async def handle(self, http: web.Request) -> web.StreamResponse: ...


class NotingGateway:
    """Says which calls came; `/generate` waits until it is told or hung up on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Mapping[str, str], bytes]] = []
        self.replicas = 1
        self.hung_up = 0

    async def handle(self, http: web.Request) -> web.StreamResponse:
        self.calls.append(
            (http.method, http.rel_url.raw_path_qs, dict(http.headers), await http.read())
        )
        if http.path == "/health":
            health = {"status": "ok", "troubles": [], "log_dropped": 0, "unversioned": {}}
            return web.json_response({**health, "replicas": self.replicas})
        if http.path == "/generate":
            try:
                await asyncio.Event().wait()
            finally:
                self.hung_up += 1
        if http.path == "/stream":
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(http)
            for part in (b"data: 1\n\n", b"data: 2\n\n"):
                await answer.write(part)
            return answer
        return web.json_response({"path": http.path}, status=418 if http.path == "/tea" else 200)


def settings_of(folder: Path, gateway: str, **changes: object) -> FrontSettings:
    model = save_checkpoint(folder / "model")
    trainer = trainer_settings(folder, gateway=gateway, checkpoint=model)
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    values: dict[str, object] = {"port": 0, "trainer": trainer, "weights_roots": (saved,)}
    return FrontSettings(**(values | {"whole_s": 0.0} | changes))  # type: ignore[arg-type]


@dataclass
class RunningFront:
    """A front between a stand-in publisher and a stand-in gateway."""

    url: str
    publisher: StandInPublisher
    gateway: NotingGateway
    saved: Path

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body) as answer,
        ):
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.call("GET", path)

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return await self.call("POST", path, body)


@asynccontextmanager
async def front_with(
    folder: Path, publisher: StandInPublisher, gateway: Gateway, **changes: object
) -> AsyncIterator[str]:
    """Yields the front's URL."""
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", gateway.handle)
    async with TestServer(app, handler_cancellation=True) as server:
        settings = settings_of(folder, str(server.make_url("")).rstrip("/"), **changes)
        roots = WeightRoots(settings.weights_roots)
        async with listening(settings, publisher, roots) as port:
            yield f"http://127.0.0.1:{port}"
