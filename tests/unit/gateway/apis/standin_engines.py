"""Stock engines without a model: what vLLM and SGLang answer, over real sockets.

Both count on from the last prompt token, as `StandInReplica` does; `break_after` cuts a stream.
"""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

from aiohttp import web

MODELS = {"/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": 400}]}}


class StockEngine:
    """Parts that both have in common; `path`, `pages` and `_event` are each one's own."""

    path = ""
    pages: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.stop_after: int | None = None
        self.break_after: int | None = None
        self.error: dict[str, Any] | None = None
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        self.live = 0
        self.most = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post(self.path, self._generate)
        app.router.add_get("/health", self._health)
        for path, answer in {**MODELS, **self.pages}.items():
            app.router.add_get(path, partial(self._page, answer))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _page(self, answer: dict[str, Any], http: web.Request) -> web.Response:
        return web.json_response(answer)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        self.requests.append(asked)
        self.most = asked.get("logprobs") or asked.get("top_logprobs_num") or 0
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        self.live += 1
        try:
            if self.error is not None:
                await response.write(b"data: " + json.dumps({"error": self.error}).encode())
                await response.write(b"\n\n")
                return response
            prompt, budget = self._wanted(asked)
            tokens = [prompt[-1] + 1 + i for i in range(budget)]
            for i in range(budget):
                if i == self.break_after:
                    assert http.transport is not None
                    http.transport.close()
                    return response
                await asyncio.sleep(self.delay_s)
                event = self._event(tokens[: i + 1], self._end(i + 1, budget))
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                if i + 1 == self.stop_after:
                    break
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            self.live -= 1
        return response

    def _likely(self, token: int, least: int = 0) -> range:
        """Return the most likely tokens at one token."""
        return range(token, token + max(least, self.most))

    def _end(self, made: int, budget: int) -> str | None:
        if made == self.stop_after:
            return "stop"
        return "length" if made == budget else None

    def _wanted(self, asked: dict[str, Any]) -> tuple[list[int], int]:
        raise NotImplementedError

    def _event(self, tokens: list[int], end: str | None) -> dict[str, Any]:
        raise NotImplementedError


class StandInVllm(StockEngine):
    """`/v1/completions` of vLLM 0.32; `/version` as everywhere in vLLM."""

    path = "/v1/completions"
    pages: ClassVar = {"/version": {"version": "0.32.0"}}

    def _wanted(self, asked: dict[str, Any]) -> tuple[list[int], int]:
        assert (asked["stream"], asked["return_token_ids"]) == (True, True)
        assert "priority" not in asked, "a stock vLLM refuses priorities"
        return asked["prompt"], asked["max_tokens"]

    def _event(self, tokens: list[int], end: str | None) -> dict[str, Any]:
        token = tokens[-1]
        likely = {f"token_id:{each}": -each / 1000 for each in self._likely(token, 1)}
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {
                "token_logprobs": [-token / 1000],
                "tokens": [f"token_id:{token}"],
                "top_logprobs": [likely],
            },
            "finish_reason": end,
            "token_ids": [token],
        }
        return {"id": "x", "object": "text_completion", "choices": [choice]}


class StandInSglang(StockEngine):
    """`/generate` of SGLang 0.5: events repeat the output, or not when `incremental`."""

    path = "/generate"
    pages: ClassVar = {"/model_info": {"model_path": "m", "is_generation": True}}

    def __init__(self, delay_s: float = 0.0, incremental: bool = False) -> None:
        super().__init__(delay_s)
        self._incremental = incremental

    def _wanted(self, asked: dict[str, Any]) -> tuple[list[int], int]:
        assert asked["return_logprob"] is True
        return asked["input_ids"], asked["sampling_params"]["max_new_tokens"]

    def _event(self, tokens: list[int], end: str | None) -> dict[str, Any]:
        shown = tokens[-1:] if self._incremental else tokens
        meta = {
            "id": "x",
            "finish_reason": {"type": end, "length": len(tokens)} if end else None,
            "weight_version": "default",
            "output_token_logprobs": [[-token / 1000, token, None] for token in shown],
            "completion_tokens": len(tokens),
        }
        if self.most:
            meta["output_top_logprobs"] = [
                [[-each / 1000, each, None] for each in self._likely(token)] for token in shown
            ]
        return {"text": "", "output_ids": shown, "meta_info": meta}
