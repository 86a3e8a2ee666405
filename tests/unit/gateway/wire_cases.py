"""Requests over real sockets, and server-sent events read back."""

import json
from typing import Any

import aiohttp

VLLM, SGLANG = "/inference/v1/generate", "/generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE_ROUTES = (VLLM, SGLANG, COMPLETIONS)


def vllm_body(max_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})}
    return {"token_ids": [1, 100], "sampling_params": sampling, **fields}


def body_of(path: str, tokens: int = 3, **sampling: Any) -> dict[str, Any]:
    """Return a route's request for a turn of this length, with sampling parameters."""
    if path == VLLM:
        return vllm_body(tokens, sampling=sampling)
    if path == SGLANG:
        return {"input_ids": [1, 100], "sampling_params": {"max_new_tokens": tokens, **sampling}}
    if path == CHAT:
        messages = [{"role": "user", "content": "x"}]
        return {"messages": messages, "max_tokens": tokens, **sampling}
    return {"prompt": [1, 100], "max_tokens": tokens, **sampling}


def tokens_of(answer: Any) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def ask(
    session: aiohttp.ClientSession, path: str, body: Any, **kw: Any
) -> tuple[int, Any, Any]:
    async with session.post(path, json=body, **kw) as response:
        return response.status, await response.json(), response.headers


async def get(session: aiohttp.ClientSession, path: str) -> Any:
    """Return a page's JSON, or its text if it has another form."""
    async with session.get(path) as response:
        assert response.status == 200
        return await (response.json() if "json" in response.content_type else response.text())


async def stream(
    session: aiohttp.ClientSession, path: str, body: Any, **kw: Any
) -> tuple[int, list[str]]:
    """Status and raw events of a stream, without the blank lines between them."""
    async with session.post(path, json={**body, "stream": True}, **kw) as response:
        text = (await response.read()).decode()
        if response.status == 200:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert text.endswith("\n\n")
        return response.status, text.split("\n\n")[:-1]


def payloads(events: list[str]) -> list[Any]:
    """Decoded `data:` lines; the last event must be the end mark."""
    assert events[-1] == "data: [DONE]"
    lines = [line for event in events[:-1] for line in event.split("\n")]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
