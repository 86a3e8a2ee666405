"""A gateway's HTTP surface without replicas: scripted answers over real sockets."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web


class StandInGateway:
    """Counts on from the last prompt token, so a turn is right when it is one unbroken count.

    Logprobs are -token / 1000. The faults are switches; `break_after` closes the connection after
    so many tokens of a stream, once unless `breaks_again`. It remembers answers by request id, as a
    gateway that lives does; with `forgets` it is one that was started anew: what it makes differs
    from token `forgets` on.
    """

    def __init__(self, port: int = 0, version: int = 0, delay_s: float = 0.0) -> None:
        self.port = port
        self.version = version
        # Version of the KV behind all tokens, if it is older than they are.
        self.kv_version: int | None = None
        self.delay_s = delay_s
        self.refuse_with: tuple[int, dict[str, str]] | None = None
        self.refusals = 10**9
        self.break_after: int | None = None
        self.new_version_after: int | None = None
        self.stream_error: dict[str, Any] | None = None
        self.forgets: int | None = None
        self.dies = self.breaks_again = False
        self.silent = False
        self.health_answers = True
        self.asked: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        self.ended_sessions: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.made = 0
        self.left = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/finish_session", self._finish)
        app.router.add_get("/health", self._health)
        app.router.add_get("/rose/v1/versions", self._versions)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, shutdown_timeout=0.05, reuse_address=True
        )
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Cut every connection, and answer nobody any more."""
        await self._runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        if not self.health_answers:
            await asyncio.sleep(60)
        return web.json_response({"status": "ok"})

    async def _versions(self, http: web.Request) -> web.Response:
        return web.json_response({"jobs": [], "replicas": []})

    async def _finish(self, http: web.Request) -> web.Response:
        assert (await http.json())["session_id"] == http.headers["X-Session-ID"]
        self.ended_sessions.append(http.headers["X-Session-ID"])
        return web.json_response({})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        self.asked.append(asked)
        self.sessions.append(http.headers["X-Session-ID"])
        if self.refuse_with is not None and self.refusals > 0:
            self.refusals -= 1
            status, headers = self.refuse_with
            body = {"error": {"type": "t", "message": f"says {status}"}}
            return web.json_response(body, status=status, headers=headers)
        try:
            if self.silent:
                await asyncio.sleep(60)
            if asked.get("stream"):
                return await self._stream(http, asked)
            return web.Response(body=await self.whole(asked), content_type="application/json")
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def whole(self, asked: dict[str, Any]) -> bytes:
        if asked["request_id"] not in self.answers:
            await asyncio.sleep(self.delay_s)
            self.made += 1
            self.answers[asked["request_id"]] = json.dumps(self._answer(asked)).encode()
        return self.answers[asked["request_id"]]

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        first, count = asked["token_ids"][-1] + 1, asked["sampling_params"]["max_tokens"]
        tokens = [*range(first, first + count)]
        content = [{"token": f"token_id:{t}", "logprob": -t / 1000} for t in tokens]
        return {
            "request_id": asked["request_id"],
            "choices": [
                {
                    "index": 0,
                    "token_ids": tokens,
                    "logprobs": {"content": content},
                    "finish_reason": "length",
                }
            ],
            "versions": [self._span(0, count)],
            "segments": [{"replica": "r", "kind": "guest", "start": 0, "end": count}],
            "attempts": 1,
        }

    def _span(self, start: int, end: int) -> dict[str, int]:
        span = {"version": self.version, "start": start, "end": end}
        return span if self.kv_version is None else span | {"oldest_version": self.kv_version}

    async def _stream(self, http: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        first, count = asked["token_ids"][-1] + 1, asked["sampling_params"]["max_tokens"]
        for i in range(count):
            if i == self.break_after:
                if not self.breaks_again:
                    self.break_after = None
                if self.dies:
                    await self._runner.sites.copy().pop().stop()
                assert http.transport is not None
                http.transport.close()
                return response
            if self.stream_error is not None and i == 1:
                await _event(response, {"error": self.stream_error})
                self.stream_error = None
                return response
            if i == self.new_version_after:
                self.version += 1
            await asyncio.sleep(self.delay_s)
            last = i == count - 1
            off = 0 if self.forgets is None or i < self.forgets else 1000
            await _event(response, self.piece(first + off + i, i, "length" if last else None))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def piece(self, token: int, at: int, finish_reason: str | None) -> dict[str, Any]:
        content = [{"token": f"token_id:{token}", "logprob": -token / 1000}]
        choice = {
            "index": 0,
            "token_ids": [token],
            "logprobs": {"content": content},
            "finish_reason": finish_reason,
        }
        piece: dict[str, Any] = {
            "request_id": "x",
            "choices": [choice],
            "versions": [self._span(at, at + 1)],
        }
        if finish_reason is not None:
            piece["segments"] = [{"replica": "r", "kind": "guest", "start": 0, "end": at + 1}]
            piece["attempts"] = 1
        return piece


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds, for at most two seconds."""
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never held")
