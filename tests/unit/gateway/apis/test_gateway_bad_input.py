"""Whatever is sent, the answer is a 4xx that says why, and nobody else notices.

Errors in the shape of each API are in the tests of that API.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rose.gateway import Gateway
from tests.harness.tokenizer_kinds import save_byte_tokenizer
from tests.unit.gateway.gateway_cases import calling, gateway_with, serving, until
from tests.unit.gateway.wire_cases import (
    CHAT,
    COMPLETIONS,
    GENERATE_ROUTES,
    SGLANG,
    VLLM,
    ask,
    body_of,
    vllm_body,
)

ABORT, POOLING = "/inference/v1/abort_requests", "/pooling"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GOOD: dict[str, Any] = {path: body_of(path, 2) for path in (*GENERATE_ROUTES, CHAT)} | {
    MESSAGES: {**body_of(CHAT, 2), "system": "x", "tools": []},
    RESPONSES: {"input": body_of(CHAT)["messages"], "max_output_tokens": 2, "session_id": "s"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    ABORT: {"request_ids": ["x"]},
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
INVALID_UTF8 = b"a\xff\xfe"
# One gateway for each table: its processes for texts take a second to start.
together = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[aiohttp.ClientSession]:
    async with calling(max_completions=8, max_model_len=400) as (_, session):
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aiohttp.ClientSession]:
    tokenizer = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    limits = {"max_model_len": 200, "max_prompt_chars": 5_000}
    async with calling(tokenizer=tokenizer, **limits) as (_, session):
        yield session


def group(**fields: Any) -> dict[str, Any]:
    return vllm_body(3, **{"group_id": "g", "group_size": 2, "hedges": 1, **fields})


def pooled(**fields: Any) -> dict[str, Any]:
    return {"model": "rose-policy", "input": "abc", "task": "classify", **fields}


WRONG: list[tuple[str, Any, str]] = [
    (VLLM, "not an object", "Expected `object`"),
    (VLLM, vllm_body(token_ids=[]), "the prompt is empty"),
    (VLLM, vllm_body(token_ids=["a"]), "token_ids"),
    (VLLM, vllm_body(token_ids=[-1]), "token ids of at least 0"),
    (VLLM, {"token_ids": [1] * 400, "sampling_params": {}}, "context length"),
    (VLLM, body_of(VLLM, 0), "max_tokens"),
    (VLLM, body_of(VLLM, 3, min_tokens=4), "min_tokens"),
    (VLLM, body_of(VLLM, 3, temprature=1), "temprature"),
    (VLLM, body_of(VLLM, 3, n=0), "n: at least 1"),
    (VLLM, body_of(VLLM, 3, n=9), "9 completions in one request, this gateway takes 8"),
    (VLLM, body_of(VLLM, 3, repetition_penalty=0), "repetition_penalty"),
    (VLLM, body_of(VLLM, 3, logprobs=1_025), "logprobs"),
    (VLLM, body_of(VLLM, 3, temperature=-1), "temperature"),
    (VLLM, body_of(VLLM, 3, min_p=1.5), "min_p"),
    (VLLM, body_of(VLLM, 3, frequency_penalty=3), "frequency_penalty"),
    (VLLM, body_of(VLLM, 3, prompt_logprobs=-1), "prompt_logprobs"),
    (VLLM, body_of(VLLM, 3, prompt_logprobs=1_025), "prompt_logprobs"),
    (VLLM, body_of(VLLM, 3, logit_bias={"1": 2.0}), "logit_bias"),
    (VLLM, body_of(VLLM, 3, structured_outputs={}), "structured_outputs"),
    (
        VLLM,
        body_of(VLLM, 3, structured_outputs={"json": "{}", "regex": "a"}),
        "structured_outputs",
    ),
    (VLLM, body_of(VLLM, 3, structured_outputs={"no_such": 1}), "no_such"),
    (VLLM, vllm_body(output_mode="text"), "output_mode"),
    (VLLM, vllm_body(timeout_s=0), "timeout"),
    (VLLM, vllm_body(min_version=1, exact_version=1), "exclude each other"),
    (VLLM, vllm_body(request_id="x" * 1_025), "request_id"),
    (VLLM, vllm_body(resume_from=10**30), "resume_from"),
    (VLLM, group(stream=True), "tokens of a stream cannot be taken back"),
    (VLLM, group(hedges=-1), "hedges"),
    (VLLM, group(hedges=3), "at most group_size"),
    (VLLM, group(group_size=None), "group_size"),
    (VLLM, group(group_size=5_000), "at most 4096"),
    (VLLM, group(group_size=-2, hedges=0), "group_size"),
    (VLLM, group(group_id=None), "group_id"),
    (VLLM, group(sampling={"frequency_penalty": 1.0}), "hedges"),
    (VLLM, group(sampling={"prompt_logprobs": 0}), "hedges"),
    *(
        (path, {**body_of(path), field: name}, field)
        for path in GENERATE_ROUTES
        for field in ("session_id", "group_id", "job")
        for name in ("x" * 513, "a\nb", "a\x00b", 7, ["g"])
    ),
    (COMPLETIONS, {"prompt": [[1]] * 9}, "--max-completions"),
    (COMPLETIONS, {"prompt": [[1]] * 3, "n": 3}, "--max-completions"),
    (COMPLETIONS, {"prompt": "text"}, "--tokenizer DIR"),
    (COMPLETIONS, body_of(COMPLETIONS, presence_penalty=-3), "presence_penalty"),
    (COMPLETIONS, body_of(COMPLETIONS, prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (COMPLETIONS, body_of(COMPLETIONS, response_format={"type": "xml"}), "response_format"),
    (COMPLETIONS, body_of(COMPLETIONS, response_format=5), "response_format"),
    (COMPLETIONS, body_of(COMPLETIONS, guided_choice="a"), "guided_choice"),
    (COMPLETIONS, body_of(COMPLETIONS, guided_regex="a", guided_json={}), "exclude each other"),
    (COMPLETIONS, body_of(COMPLETIONS, guided_regex="a" * 70_000), "65536"),
    (CHAT, body_of(CHAT), "--tokenizer DIR"),
    (SGLANG, {"sampling_params": {"max_new_tokens": 2}}, "input_ids"),
    (SGLANG, {"text": "no tokenizer here"}, "--tokenizer DIR"),
    (SGLANG, {**body_of(SGLANG), "input_ids": [[1]] * 9}, "--max-completions"),
    (SGLANG, body_of(SGLANG, regex="a*", ebnf="b"), "exactly one of json, regex"),
    (SGLANG, body_of(SGLANG, max_tokens=2), "max_tokens"),
    (SGLANG, body_of(SGLANG, stop="x"), "--tokenizer DIR"),
    (SGLANG, body_of(SGLANG, repetition_penalty=-1), "repetition_penalty"),
    (SGLANG, {**body_of(SGLANG), "image_data": "x"}, "image_data"),
    (SGLANG, {**body_of(SGLANG), "top_logprobs_num": 1_025}, "top_logprobs_num"),
    (
        SGLANG,
        {**body_of(SGLANG), "return_logprob": True, "top_logprobs_num": 2, "stream": True},
        "top_logprobs_num",
    ),
    (SGLANG, {**body_of(SGLANG), "logprob_start_len": 0}, "logprob_start_len"),
    (SGLANG, {**body_of(SGLANG), "input_ids": [1, [2]]}, "input_ids"),
    (SGLANG, {**body_of(SGLANG), "rid": ["a", "b"]}, "rid"),
    (POOLING, "[]", "Expected `object`"),
    (POOLING, pooled(timeout_s=-1), "timeout"),
    (POOLING, pooled(min_version="x"), "min_version"),
    (POOLING, pooled(min_version=1, exact_version=1), "exclude each other"),
    (POOLING, pooled(priority=1.5), "priority"),
]
WRONG_TEXT: list[tuple[str, Any, str]] = [
    (COMPLETIONS, {"prompt": "A", "max_tokens": 200}, "context length"),
    (COMPLETIONS, {"prompt": "A", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": "A", "logit_bias": {"1": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "A", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "A", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "A", "stop": ["z" * 3_000, "y" * 3_000]}, "4096 characters"),
    (COMPLETIONS, {"prompt": ["x" * 3_000] * 2}, "takes 5000"),
    (COMPLETIONS, {"prompt": ["x"] * 4_097}, "4097 completions"),
    (SGLANG, {"text": ["x" * 3_000] * 2}, "takes 5000"),
    (SGLANG, {"text": "x", "sampling_params": {"stop": "z" * 5_000}}, "4096 characters"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [[]]}, "messages"),
    (CHAT, body_of(CHAT, tools=[{}]), "tools"),
    (CHAT, body_of(CHAT, top_logprobs=1), "top_logprobs"),
    (CHAT, body_of(CHAT, n=0), "n: at least 1"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "context length"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5_001}]}, "takes 5000"),
    ("/tokenize", {"prompt": "x" * 5_001}, "takes 5000"),
    ("/tokenize", {"prompt": "x" * 5_001, "return_token_strs": True}, "takes 5000"),
    ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
    *(
        (path, body_of(CHAT, chat_template_kwargs=variables), "chat_template_kwargs")
        for path in (CHAT, "/tokenize")
        for variables in (
            {"chat_template": "{{ 'a' * 9 }}"},
            {"tokenize": False},
            {"return_dict": True},
            {"return_tensors": "np"},
            {"return_assistant_tokens_mask": True},
            {"padding": "max_length"},
            {"max_length": 20_000_000},
            {"truncation": True},
            {"tools": None},
            {"documents": None},
            {"messages": "x"},
            {"tokenizer_kwargs": None},
            {"enable_thinking": {"a": []}},
            {"not a name": 1},
            {"x" * 65: 1},
            {"big": 10**30},
            {"long": "x" * 5_000},
            {f"v{k}": k for k in range(33)},
        )
    ),
]


async def refused(session: aiohttp.ClientSession, path: str, body: Any, word: str) -> None:
    status, answer, _ = await ask(session, path, body)
    assert (status, answer["error"].get("code", 400)) == (400, 400), answer
    assert word in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


@together
@pytest.mark.parametrize(("path", "body", "word"), WRONG)
async def test_what_cannot_be_honoured_is_refused_in_a_line_that_names_it(
    plain: aiohttp.ClientSession, path: str, body: Any, word: str
) -> None:
    await refused(plain, path, body, word)


@together
@pytest.mark.parametrize(("path", "body", "word"), WRONG_TEXT)
async def test_texts_that_cannot_be_honoured_are_refused_in_a_line_that_names_why(
    texty: aiohttp.ClientSession, path: str, body: Any, word: str
) -> None:
    await refused(texty, path, body, word)


# ---- what is no request ----


async def post_raw(session: Any, path: str, data: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=data, headers=headers) as response:
        return response.status, await response.read()


@together
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"a":', b"[" * 5_000, b'{"stream":"maybe"}']
)
async def test_what_is_not_a_request_is_400(
    plain: aiohttp.ClientSession, path: str, data: bytes
) -> None:
    status, body = await post_raw(plain, path, data)
    if path == ABORT and data == b'{"stream":"maybe"}':
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


@pytest.mark.parametrize("seed", range(3))
async def test_mutated_requests_are_answered_and_honest_ones_beside_them_too(seed: int) -> None:
    dice = random.Random(seed)
    async with serving(version_wait_s=0.05) as (_, gw, session):
        for _ in range(150):
            path = dice.choice(list(GOOD))
            data = json.dumps(mutate(dice, GOOD[path])).encode()
            status, body = await post_raw(session, path, data)
            assert status in (200, 400, 404, 409), (path, data, body)
            assert status == 200 or json.loads(body)["error"]["message"], (path, data, body)
            if dice.random() < 0.2:
                assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
        assert not any(gw.status().live_turns.values())
        assert gw.status().waiting == 0


@pytest.mark.parametrize("path", GOOD)
async def test_an_oversized_body_is_413_before_it_is_read_whole(path: str) -> None:
    async with calling(max_body_bytes=1_000) as (_, session):
        status, body = await post_raw(session, path, b'{"prompt":"' + b"x" * 5_000 + b'"}')
    assert status == 413
    assert json.loads(body)["error"]["message"]


# ---- bytes, and headers that mean nothing ----


async def exchange(gateway: Gateway, path: str, *headers: bytes, body: bytes = b"") -> Any:
    """Send one request as raw bytes; return the status and the message of its error."""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        path.encode(),
        len(body),
    )
    return await raw(gateway, head + b"".join(line + b"\r\n" for line in headers) + b"\r\n" + body)


async def raw(gateway: Gateway, sent: bytes) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    head, _, said = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(said)["error"]["message"]


@pytest.mark.parametrize(
    "header",
    [
        b"Last-Event-ID: x",
        b"Last-Event-ID: \xc2\xb2",
        b"Last-Event-ID: \xd9\xa3",
        b"Last-Event-ID: " + b"1" * 5_000,
        b"Last-Event-ID: -1",
        b"X-Request-Id: " + INVALID_UTF8,
        b"X-Session-ID: " + INVALID_UTF8,
        b"X-Group-ID: " + INVALID_UTF8,
        b"X-Rose-Job: " + INVALID_UTF8,
        b"X-Request-Timeout: " + INVALID_UTF8,
        b"X-Request-Timeout: x",
        b"X-Request-Timeout: nan",
        b"Transfer-Encoding: gzip",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_that_means_nothing_is_400(header: bytes, stream: bool) -> None:
    body = json.dumps(vllm_body(2, stream=stream)).encode()
    async with gateway_with() as gw:
        status, message = await exchange(gw, VLLM, header, body=body)
    assert status == 400
    assert message


X_SESSION = b"X-Session-ID: " + INVALID_UTF8
CODINGS = (b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip")


@pytest.mark.parametrize(
    ("path", "header", "status", "word"),
    [
        ("/finish_session", X_SESSION, 400, "session_id"),
        *((VLLM, b"Content-Encoding: " + each, 415, "Content-Encoding") for each in CODINGS),
        *(
            (path, b"Expect: " + expected, 417, path)
            for path in (VLLM, "/nowhere")
            for expected in (b"a miracle", INVALID_UTF8)
        ),
    ],
)
async def test_what_a_head_asks_for_in_vain_is_said(
    path: str, header: bytes, status: int, word: str
) -> None:
    async with gateway_with() as gw:
        got, message = await exchange(
            gw, path, header, body=b"" if path == "/finish_session" else b"zz" * 99
        )
    assert got == status
    assert word in message


async def test_bytes_that_are_no_http_get_a_structured_400() -> None:
    async with gateway_with() as gw:
        status, message = await raw(gw, b"\x16\x03\x01\x02\x00\x01 not HTTP\r\n\r\n")
    assert (status, "HTTP" in message) == (400, True)


async def test_half_closed_and_half_sent_requests_cost_nothing() -> None:
    async with serving(stall_s=9) as (replica, gw, session):
        replica.hang_after = 1
        body = json.dumps(vllm_body(9)).encode()
        head = f"POST {VLLM} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        (_, whole), (_, half) = [
            await asyncio.open_connection("127.0.0.1", gw.port) for _ in range(2)
        ]
        whole.write(head.encode() + body)
        await until(lambda: replica.live == 1)
        # A client that has closed its side counts as gone, as for vLLM's server.
        whole.write_eof()
        await until(lambda: replica.cancelled == 1)
        half.write(head.encode() + body[:9])
        half.write_eof()
        replica.hang_after = None
        assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
        assert gw.status().live_turns == {"guest-0": 0}
        for writer in (whole, half):
            writer.close()


# Two change nothing in vLLM either: names of users, and penalties of beam search; so do hints for
# caches and tiers of service. One says how images are given back, of which there are none.
IGNORED = {"user", "length_penalty", "mm_payload", "metadata", "prompt_cache_key", "service_tier"}


def test_every_field_that_vllm_reads_is_read_or_refused() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    from rose.gateway.apis import chat, completions, messages, responses

    for theirs, ours in (
        (ChatCompletionRequest, chat.ChatBody),
        (CompletionRequest, completions._CompletionBody),
        (AnthropicMessagesRequest, messages._MessagesBody),
        (ResponsesRequest, responses._ResponsesBody),
    ):
        unread = set(theirs.model_fields) - set(ours.__struct_fields__) - IGNORED
        assert not unread, f"{theirs.__name__}: dropped in silence"
