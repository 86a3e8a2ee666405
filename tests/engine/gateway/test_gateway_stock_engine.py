"""Stock vLLM behind the gateway: the same answers as asked directly, and turns that outlive it."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_specs import ONE, TWO
from pool import Started
from tiny_model import VOCABULARY

from rose.gateway import Gateway
from rose.gateway.settings import parse_settings
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(ONE, TWO, spends=True),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

MODEL = ONE.served
PROMPT = [(7 * k + 3) % 90 for k in range(40)]
GREEDY = {"max_tokens": 24, "temperature": 0.0}
EXTRA = {"versions", "segments", "attempts"}
# Fields of an engine itself, or made anew for every answer.
OWN = {"request_id", "id", "created", "system_fingerprint", "rank"}
# An engine calls whatever it started with its version; the gateway does not take that for one.
UNKNOWN = "weight_versions"
# Their keys are tokens, or they may be null on either side.
FREE = {UNKNOWN, "rank", "top_logprobs", "system_fingerprint", "finish_reason"}
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "go"}]
BODIES = {
    GENERATE: {"token_ids": PROMPT, "sampling_params": {**GREEDY, "logprobs": 0}},
    COMPLETIONS: {"prompt": "Hello", "logprobs": 0, "return_token_ids": True, **GREEDY},
    CHAT: {"messages": MESSAGES, "logprobs": True, "return_token_ids": True, **GREEDY},
}
BAD = [
    (GENERATE, {"token_ids": [], "sampling_params": GREEDY}),
    (GENERATE, {"token_ids": [-1], "sampling_params": GREEDY}),
    (GENERATE, {"token_ids": [1] * 600, "sampling_params": GREEDY}),
    (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}),
    (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": -1}}),
    (GENERATE, {"token_ids": [1], "sampling_params": GREEDY, "model": "other"}),
    (COMPLETIONS, {"prompt": "x", "model": "other"}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
    (COMPLETIONS, {"prompt": "x", "top_p": 7}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5000}),
    ("/tokenize", {"tokens": 5}),
    ("/nowhere", {}),
]


@dataclass
class Stage:
    """Two stock engines, and a gateway that was given nothing but their URLs."""

    engines: list[Started]
    gateway: Gateway
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def engine(self) -> str:
        return self.engines[0].url

    async def post(self, base: str, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(base + path, json=body) as response:
            return response.status, await response.json()

    async def events(self, base: str, path: str, body: Any) -> list[Any]:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.http.post(base + path, json=asked) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(engines: list[Started]) -> AsyncIterator[Stage]:
    argv = ["--port=0", f"--model-name={MODEL}", f"--tokenizer={engines[0].spec.model_dir}"]
    argv += ["--stall-s=2", *(f"--replica={engine.url}" for engine in engines)]
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        Gateway(parse_settings(argv)) as gateway,
    ):
        stage = Stage(engines, gateway, http)
        await until_async(lambda: gateway.status().usable == 2, 30, "both are found", 0.05)
        # The first step of an engine takes seconds.
        for engine in engines:
            await stage.post(engine.url, COMPLETIONS, BODIES[COMPLETIONS])
        yield stage


def ours_alone(value: dict[str, Any]) -> set[str]:
    """Return the gateway's own fields; beside a token's id also its earlier name."""
    return EXTRA | {"token"} if "token_id" in value else EXTRA


def shape(value: Any) -> Any:
    """Keys in their order, all the way down; lists by their first element."""
    if isinstance(value, dict):
        return [
            (key, None if key in FREE else shape(item))
            for key, item in value.items()
            if key not in ours_alone(value)
        ]
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return None


def comparable(value: Any) -> Any:
    """Return the fields that must be equal: all but those made anew for each answer."""
    if isinstance(value, dict):
        free = ours_alone(value) | OWN | {UNKNOWN}
        return {k: comparable(v) for k, v in value.items() if k not in free}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("path", list(BODIES))
async def test_whole_answers_are_the_engines_own_key_by_key(stage: Stage, path: str) -> None:
    _, direct = await stage.post(stage.engine, path, BODIES[path])
    status, ours = await stage.post(stage.url, path, BODIES[path])
    assert status == 200
    assert shape(ours) == shape(direct)
    assert comparable(ours) == comparable(direct)


def merged(path: str, events: list[Any]) -> tuple[list[int], str]:
    """Tokens and text of a whole stream."""
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    if path == CHAT:
        return tokens, "".join(choice["delta"].get("content") or "" for choice in choices)
    return tokens, "".join(choice.get("text") or "" for choice in choices)


@pytest.mark.parametrize("path", list(BODIES))
async def test_streams_have_the_engines_events(stage: Stage, path: str) -> None:
    direct = await stage.events(stage.engine, path, BODIES[path])
    ours = await stage.events(stage.url, path, BODIES[path])
    assert merged(path, ours) == merged(path, direct)
    assert len(merged(path, ours)[0]) == GREEDY["max_tokens"]
    for mine, theirs in ((ours[0], direct[0]), (ours[-2], direct[-2]), (ours[-1], direct[-1])):
        assert [k for k in shape(mine) if k[0] not in OWN] == [
            k for k in shape(theirs) if k[0] not in OWN
        ]
    assert comparable(ours[-1]) == comparable(direct[-1])


@pytest.mark.parametrize("case", range(len(BAD)))
async def test_bad_requests_get_the_engines_status_and_error_shape(stage: Stage, case: int) -> None:
    path, body = BAD[case]
    theirs, direct = await stage.post(stage.engine, path, body)
    status, ours = await stage.post(stage.url, path, body)
    assert status == theirs, (direct, ours)
    if path != "/nowhere":
        assert list(ours["error"]) == list(direct["error"])
        assert ours["error"]["message"]


async def test_a_stop_string_ends_where_the_engine_ends_it(stage: Stage) -> None:
    _, free = await stage.post(stage.engine, COMPLETIONS, BODIES[COMPLETIONS])
    text = free["choices"][0]["text"]
    body = {**BODIES[COMPLETIONS], "stop": [text[9:11]]}
    _, direct = await stage.post(stage.engine, COMPLETIONS, body)
    _, ours = await stage.post(stage.url, COMPLETIONS, body)
    assert direct["choices"][0]["finish_reason"] == "stop"
    assert comparable(ours) == comparable(direct)


async def test_health_and_models_tell_what_was_found(stage: Stage) -> None:
    async with stage.http.get(f"{stage.url}/health") as response:
        health = await response.json()
    async with stage.http.get(f"{stage.url}/v1/models") as response:
        card = (await response.json())["data"][0]
    assert set(health["unversioned"].values()) == {"vllm"}
    assert (card["id"], card["max_model_len"]) == (MODEL, 512)


async def test_turns_outlive_a_killed_stock_engine_token_for_token(stage: Stage) -> None:
    prompts = [[(5 * k + 11 * turn + 1) % VOCABULARY for k in range(30)] for turn in range(6)]
    bodies = [
        {"token_ids": p, "sampling_params": {**GREEDY, "max_tokens": 300, "logprobs": 0}}
        for p in prompts
    ]
    expected = [
        (await stage.post(stage.engine, GENERATE, body))[1]["choices"][0]["token_ids"]
        for body in bodies
    ]
    running = [asyncio.create_task(stage.post(stage.url, GENERATE, body)) for body in bodies]
    first = stage.engine.removeprefix("http://")
    stats = stage.gateway.stats
    before = stats.tokens[first]
    await until_async(lambda: stats.tokens[first] >= before + 60, 30, "it makes tokens", 0.005)
    stage.engines[0].spend("it is killed")
    stage.engines[0].signal(signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert [answer["choices"][0]["token_ids"] for _, answer in answers] == expected
    assert any(len(answer["segments"]) == 2 for _, answer in answers)
    assert all(answer["attempts"] <= 2 for _, answer in answers)
    assert all(answer["versions"] == [] for _, answer in answers)
