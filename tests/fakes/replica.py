"""A replica's HTTP surface without an engine: scripted streams over real sockets."""

import asyncio
import base64
import hashlib
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Line = dict[str, Any]
Write = Callable[[Line], Awaitable[None]]


def top_row(token: int, most: int) -> bytes:
    """Return the most likely tokens at one token: itself, then the next ones."""
    ids = range(token, token + most)
    return struct.pack(f"<{most}i{most}f", *ids, *[-each / 1000 for each in ids])


def route_row(token: int) -> bytes:
    """Return the experts of a token's position: three in each of two layers."""
    return bytes((7 * token + each) % 256 for each in range(6))


def routes(token: int) -> list[Any]:
    """Return the experts of a token's position as a line has them."""
    return [2, 3, 1, base64.b64encode(route_row(token)).decode()]


PLACE = 70
"""Token that stands for an image, in the place of which a replica puts IMAGE_TOKENS."""
IMAGE_TOKENS = [71, 70, 70]


def with_images(prompt: list[int]) -> list[int]:
    """Return the prompt with the tokens of images in the place of each PLACE that is not one."""
    made: list[int] = []
    for token in prompt:
        inside = made[-1:] in ([IMAGE_TOKENS[0]], [PLACE])
        made += [token] if token != PLACE or inside else IMAGE_TOKENS
    return made


class StandInReplica:
    """Counts on from the last prompt token; the faults are switches.

    Token i of an answer is (last prompt token + 1 + i), its logprob is -token / 1000: a
    continuation is right exactly when the whole answer is one unbroken count.
    """

    def __init__(
        self,
        version: int = 0,
        delay_s: float = 0.0,
        *,
        pools: tuple[str, ...] = (),
    ) -> None:
        """pools: routes of a model that is not generative; they count their input's letters."""
        self.pools = pools
        self.version = version
        self.delay_s = delay_s
        # Tokens from this one on are sampled by the next version, on KV that was kept.
        self.update_at: int | None = None
        self.revoke_after: int | None = None
        self.break_after: int | None = None
        self.hang_after: int | None = None
        self.draining = False
        self.bad_request = False
        self.gives_top = self.gives_routes = True
        # Files of images by hash, and those that were sent, in order.
        self.images: dict[str, bytes] = {}
        self.sent_images: list[str] = []
        self.takes_images = True
        self.stop_after: int | None = None
        self.script: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        # Number of turns of each batch request, and places of those that left it.
        self.batches: list[int] = []
        self.left: list[int] = []
        # Place of a batch's turn that is refused.
        self.refuse_at: int | None = None
        # No request of several turns is read.
        self.refuse_batches = False
        self.traces: list[str | None] = []
        self.cancelled = 0
        self.live = 0
        self.max_live = 0
        self.url = ""
        self._sockets: set[asyncio.Transport] = set()
        self._running: dict[str, list[asyncio.Task[None]]] = {}
        self._site: web.TCPSite | None = None

    def kill(self) -> None:
        """Die like a process: every connection breaks, and nobody listens any more."""
        assert self._site is not None
        assert self._site._server is not None
        self._site._server.close()
        for transport in self._sockets:
            transport.abort()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/rose/v1/generate", self._generate)
        app.router.add_post("/rose/v1/generate_batch", self._generate_batch)
        app.router.add_post("/rose/v1/generate_batch/leave", self._leave)
        app.router.add_post("/rose/v1/images", self._hold_image)
        app.router.add_get("/rose/v1/state", self._state)
        for path in self.pools:
            app.router.add_post(path, self._pool)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _state(self, http: web.Request) -> web.Response:
        return web.json_response(
            {
                "replica_id": "x",
                "role": "guest",
                "policy_version": self.version,
                "proven": True,
                "admitting": not self.draining,
                "epoch": 0,
                "running": self.live,
                "waiting": 0,
                "tokens_total": 0,
            }
        )

    async def _pool(self, http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        self.requests.append(asked | {"job": http.query.get("rose_job")})
        if self.draining:
            return web.json_response({"error": {"type": "draining", "message": "-"}}, status=503)
        if self.bad_request:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if self.hang_after is not None:
            await asyncio.sleep(60)
        data = [{"index": 0, "object": "pooling", "data": [len(str(asked["input"]))]}]
        answer = json.dumps({"model": "replica", "data": data}).encode()
        if self.break_after is None:
            return web.Response(body=answer, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(answer))})
        await response.prepare(http)
        await response.write(answer[: self.break_after])
        assert http.transport is not None
        http.transport.close()
        return response

    async def _hold_image(self, http: web.Request) -> web.Response:
        data = await http.read()
        if not self.takes_images:
            fault = {"error": {"message": "images: the engine's model takes none"}}
            return web.json_response(fault, status=400)
        name = hashlib.sha256(data).hexdigest()
        self.images[name] = data
        self.sent_images.append(name)
        return web.json_response({"sha256": name})

    def _missing(self, asked: dict[str, Any]) -> str:
        return next((each for each in asked.get("images", ()) if each not in self.images), "")

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        self.requests.append(asked)
        self.paths.append(http.path)
        self.traces.append(http.headers.get("traceparent"))
        if self.draining:
            return web.json_response({"error": {"type": "draining", "message": "-"}}, status=503)
        if self.bad_request:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if missing := self._missing(asked):
            return web.json_response({"error": {"message": f"images: {missing}"}}, status=428)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        assert isinstance(http.transport, asyncio.Transport)
        self._sockets.add(http.transport)
        self.live += 1
        self.max_live = max(self.max_live, self.live)

        async def write(line: Line) -> None:
            await response.write(json.dumps(line).encode() + b"\n")

        try:
            if await self._stream(http, write, asked):
                await response.write_eof()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1
        return response

    async def _generate_batch(self, http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        turns = asked["turns"]
        self.batches.append(len(turns))
        if self.refuse_batches:
            return web.json_response({"error": {"message": "spoilt"}}, status=400)
        if self.draining:
            return web.json_response({"error": {"type": "draining", "message": "-"}}, status=503)
        self.requests += turns
        self.paths += [http.path] * len(turns)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        assert isinstance(http.transport, asyncio.Transport)
        self._sockets.add(http.transport)
        self.live += len(turns)
        self.max_live = max(self.max_live, self.live)

        async def run(place: int, turn: dict[str, Any]) -> None:
            async def write(line: Line, *status: int) -> None:
                await response.write(json.dumps([place, line, *status]).encode() + b"\n")

            if self.bad_request or place == self.refuse_at:
                await write({"message": "too long"}, 400)
            elif missing := self._missing(turn):
                await write({"message": f"images: {missing}"}, 428)
            else:
                await self._stream(http, write, turn)

        tasks = [asyncio.create_task(run(*each)) for each in enumerate(turns)]
        self._running[asked["batch"]] = tasks
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await response.write_eof()
        except asyncio.CancelledError:
            self.cancelled += sum(not task.done() for task in tasks)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.live -= len(turns)
        return response

    async def _leave(self, http: web.Request) -> web.Response:
        asked = await http.json()
        self.left += asked["turns"]
        for place in asked["turns"]:
            self._running[asked["batch"]][place].cancel()
        return web.json_response({})

    async def _of_prompt(self, write: Write, asked: dict[str, Any]) -> None:
        """Write what a turn asks for of its prompt, before its first token."""
        prompt, sampling = asked["token_ids"], asked["sampling"]
        whole = with_images(prompt)
        if asked.get("images") and whole != prompt:
            for token in whole:
                await write({"prompt_token_ids": [token]})
        if sampling.get("prompt_logprobs") is not None:
            places = [[[token, -token / 1000, 1]] for token in prompt]
            places[0] = None
            for start in range(0, len(places), 2):
                part = {"version": self.version, "prompt_logprobs": places[start : start + 2]}
                await write(part)
        start = sampling.get("routed_experts_prompt_start")
        for token in () if start is None else prompt[start:-1]:
            await write({"routed_experts": routes(token)})

    def _beside(self, sampling: dict[str, Any], token: int, before: int) -> Line:
        """Return what a turn asks for beside one token; `before`: the token before it."""
        line: Line = {}
        most = sampling.get("logprobs", 0)
        if most and self.gives_top:
            line["top_logprobs"] = base64.b64encode(top_row(token, most)).decode()
        if sampling.get("routed_experts_prompt_start") is not None and self.gives_routes:
            line["routed_experts"] = routes(before)
        return line

    async def _stream(self, http: web.Request, write: Write, asked: dict[str, Any]) -> bool:
        """Return True if the turn ended by itself."""
        first = asked["token_ids"][-1] + 1
        budget = asked["sampling"]["max_tokens"]
        await self._of_prompt(write, asked)
        before = asked["token_ids"][-1]
        for i in range(min(budget, self.stop_after or budget)):
            if i == self.revoke_after:
                await write({"finish_reason": "revoked"})
                return False
            if i == self.break_after:
                assert http.transport is not None
                http.transport.close()
                return False
            if i == self.hang_after:
                await asyncio.sleep(60)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            token = self.script[i] if self.script else first + i
            line = {"token_ids": [token], "logprobs": [-token / 1000], "version": self.version}
            line |= self._beside(asked["sampling"], token, before)
            before = token
            if self.update_at is not None and i >= self.update_at:
                line |= {"version": self.version + 1, "oldest_version": self.version}
            await write(line)
        done = "stop" if self.stop_after else "length"
        await write({"finish_reason": done})
        return True
