"""Whatever is sent, the answer is a 4xx that says why, and nobody else notices."""

import asyncio
import json
import random
from typing import Any

import pytest
from gateway_cases import calling, serving, until
from wire_cases import VLLM, ask, vllm_body

from rose.gateway import Gateway

ROUTES = (
    VLLM,
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/inference/v1/abort_requests",
)
GOOD = {
    VLLM: vllm_body(2),
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
}
NONSENSE: list[Any] = [
    None,
    -1,
    0,
    2**70,
    1e400,
    "",
    "x",
    "\ud83d",
    [],
    [None],
    {},
    {"a": {}},
    True,
]


async def post_raw(session: Any, path: str, data: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=data, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":', b"[" * 5_000, b'{"stream":"maybe"}']
)
async def test_what_is_not_a_request_is_400(path: str, data: bytes) -> None:
    async with calling() as (_, session):
        status, body = await post_raw(session, path, data)
    if path.endswith("abort_requests") and data == b'{"stream":"maybe"}':
        return
    assert status == 400
    assert json.loads(body)["error"]["message"]


def mutate(dice: random.Random, body: Any) -> Any:
    """One field somewhere made nonsense, taken away or doubled."""
    body = json.loads(json.dumps(body))
    spot = body
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        if not keys:
            return body
        key = dice.choice(keys)
        if isinstance(spot[key], (dict, list)) and spot[key] and dice.random() < 0.6:
            spot = spot[key]
            continue
        if isinstance(spot, dict) and dice.random() < 0.2:
            del spot[key]
        else:
            spot[key] = dice.choice(NONSENSE)
        return body


@pytest.mark.parametrize("seed", range(6))
async def test_mutated_requests_are_answered_and_honest_ones_beside_them_too(seed: int) -> None:
    dice = random.Random(seed)
    async with serving(version_wait_s=0.05) as (_, gw, session):
        for _ in range(150):
            path = dice.choice(ROUTES)
            data = json.dumps(mutate(dice, GOOD[path])).encode()
            status, body = await post_raw(session, path, data)
            assert status in (200, 400, 404, 409), (path, data, body)
            assert status == 200 or json.loads(body)["error"]["message"], (path, data, body)
            if dice.random() < 0.2:
                assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
        assert not any(gw.status().live_turns.values())
        assert gw.status().waiting == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_an_oversized_body_is_413_before_it_is_read_whole(path: str) -> None:
    async with calling(max_body_bytes=1_000) as (_, session):
        status, body = await post_raw(session, path, b'{"prompt":"' + b"x" * 5_000 + b'"}')
    assert status == 413
    assert json.loads(body)["error"]["message"]


async def _connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port)


async def test_half_closed_and_half_sent_requests_cost_nothing() -> None:
    async with serving(stall_s=9) as (replica, gw, session):
        replica.hang_after = 1
        body = json.dumps(vllm_body(9)).encode()
        head = f"POST {VLLM} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        _, whole = await _connect(gw)
        whole.write(head.encode() + body)
        await until(lambda: replica.live == 1)
        # A client that has closed its side counts as gone, as for vLLM's server.
        whole.write_eof()
        await until(lambda: replica.cancelled == 1)
        _, half = await _connect(gw)
        half.write(head.encode() + body[:9])
        half.write_eof()
        _, garbage = await _connect(gw)
        garbage.write(b"\x16\x03\x01 not HTTP\r\n\r\n")
        replica.hang_after = None
        assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
        assert gw.status().live_turns == {"guest-0": 0}
        for writer in (whole, half, garbage):
            writer.close()


# The first two change nothing in vLLM either: names of users, and penalties of beam search. The
# third says how images are given back, of which there are none.
IGNORED = {"user", "length_penalty", "mm_payload"}


def test_every_field_that_vllm_reads_is_read_or_refused() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from rose.gateway.apis import chat, completions

    for theirs, ours in (
        (ChatCompletionRequest, chat._ChatBody),
        (CompletionRequest, completions._CompletionBody),
    ):
        unread = set(theirs.model_fields) - set(ours.__struct_fields__) - IGNORED
        assert not unread, f"{theirs.__name__}: dropped in silence"
