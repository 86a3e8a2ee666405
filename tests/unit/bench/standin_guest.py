"""A stand-in guest: applies real manifests to real weights over HTTP, and stamps what it says."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from weight_transfer import Receiver, StagedUpdate, VerifyKey, read_chunk, read_safetensors
from weight_transfer.format.manifest import Manifest


class StandInGuest:
    """Its engine is a receiver; staging takes `staging_s`, and a turn `turn_s`."""

    def __init__(self, weights: Path, key: VerifyKey, staging_s: float = 0.15) -> None:
        self.receiver = Receiver(read_safetensors(weights))
        self.stamped_late = False
        self.dead = False
        self._key = key
        self._staging_s, self._turn_s = staging_s, 0.02
        self._epoch: int | None = None

    async def start(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/rose/v1/admit", self._admit)
        app.router.add_post("/rose/v1/generate", self._generate)
        app.router.add_post("/rose/v1/weights/apply", self._apply)
        server = TestServer(app)
        await server.start_server()
        return server

    async def _admit(self, request: web.Request) -> web.Response:
        self._epoch = (await request.json())["epoch"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        if self.dead or self._epoch is None:
            return web.json_response({"error": {"type": "draining"}}, status=503)
        count = (await request.json())["sampling"]["max_tokens"]
        versions = [self._stamp()]
        await asyncio.sleep(self._turn_s)
        versions.append(self._stamp())
        lines = [{"token_ids": [1] * (count // 2), "version": version} for version in versions]
        return web.Response(text="\n".join(map(json.dumps, [*lines, {"finish_reason": "length"}])))

    def _stamp(self) -> int:
        return 0 if self.stamped_late else self.receiver.version

    def _staged(self, path: Path, folder: Path) -> StagedUpdate:
        manifest = Manifest.from_bytes(path.read_bytes())
        chunks = {ref.id: read_chunk(folder, ref.id) for ref in manifest.chunks}
        return self.receiver.decode(manifest, chunks, self._key, time.time())

    async def _apply(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if self.dead:
            await asyncio.sleep(3600)
        staged = self._staged(Path(body["manifest"]), Path(body["chunks"]))
        await asyncio.sleep(self._staging_s)
        self.receiver.commit(staged)
        return web.json_response(
            {"version": staged.version, "pause_s": 0.01 * staged.version, "probe_ok": True}
        )
