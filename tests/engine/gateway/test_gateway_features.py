"""Features that trainers use besides tokens, through the gateway and real engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_specs import REWARD, WORDED
from pool import BYTES, Started

from elastic_scheduler import ReplicaKind
from rose.client import RolloutClient, Sampling
from rose.gateway import Gateway, GatewaySettings, StaticReplica
from rose.gateway.replicas import static
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(WORDED, REWARD),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
PROMPT = [(7 * k + 3) % BYTES for k in range(40)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PATIENCE_S = 60.0
CALL = r'<tool_call>\{"name": "look", "arguments": \{"x": [0-9]\}\}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


@dataclass
class FeatureStage:
    """A gateway for policy and reward model each: they are different jobs' in a cluster."""

    policy: Started
    reward: Started
    gateway: Gateway
    rewards: Gateway
    http: aiohttp.ClientSession

    async def ask(self, path: str, body: Any, gateway: Gateway | None = None) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{(gateway or self.gateway).port}{path}"
        async with self.http.post(url, json=body) as answer:
            return answer.status, await answer.json()

    async def sampled(self, tokens: int, **sampling: Any) -> dict[str, Any]:
        """A turn through the gateway."""
        params = {"max_tokens": tokens, "logprobs": 0, **GREEDY, **sampling}
        body = {"token_ids": PROMPT, "sampling_params": params}
        status, answer = await self.ask(GENERATE, body)
        assert status == 200, answer
        return dict(answer)

    async def direct(self, tokens: int, **sampling: Any) -> dict[str, Any]:
        """The engine's own answer."""
        body = {"model": WORDED.name, "prompt": PROMPT, "max_tokens": tokens, "logprobs": 0}
        body |= {"return_token_ids": True, **GREEDY, **sampling}
        url = f"{self.policy.url}{COMPLETIONS}"
        async with self.http.post(url, json=body, headers=self.policy.headers) as answer:
            assert answer.status == 200, await answer.text()
            return dict((await answer.json())["choices"][0])

    async def control(self, what: str, **body: Any) -> None:
        url = f"{self.policy.url}/rose/v1/{what}"
        asked = {"epoch": next(self.policy.epochs), **body}
        async with self.http.post(url, json=asked, headers=self.policy.headers) as answer:
            answer.raise_for_status()


def before(engine: Started, **more: Any) -> Gateway:
    row = StaticReplica(engine.spec.name, ReplicaKind.DEDICATED, engine.url, 32)
    return Gateway(
        GatewaySettings(port=0, replicas=(row,), max_attempts=24, text_timeout_s=60.0, **more)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(engines: list[Started]) -> AsyncIterator[FeatureStage]:
    policy, reward = engines
    more = {"tokenizer": policy.spec.model_dir, "tool_call_parser": "hermes"}
    timeout = aiohttp.ClientTimeout(total=240)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "POLL_S", 0.05)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            before(policy, **more) as gateway,
            before(reward) as rewards,
        ):
            both = (gateway, rewards)
            await until_async(
                lambda: all(each.status().usable for each in both),
                PATIENCE_S,
                "both are found",
                0.05,
            )
            stage = FeatureStage(policy, reward, gateway, rewards, http)
            await stage.sampled(8)
            yield stage


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "min_p": 0.2},
    ],
)
async def test_penalties_are_the_engines_own(
    stage: FeatureStage, sampling: dict[str, float]
) -> None:
    plain = tokens_of(await stage.sampled(40))
    ours = tokens_of(await stage.sampled(40, **sampling))
    assert ours == (await stage.direct(40, **sampling))["token_ids"]
    assert ours != plain, "else this shows nothing"


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 1.5}, {"repetition_penalty": 1.8}])
async def test_a_turn_with_penalties_that_is_drained_is_the_turn_that_was_not(
    stage: FeatureStage, sampling: dict[str, float]
) -> None:
    expected = await stage.sampled(300, **sampling)
    running = asyncio.create_task(stage.sampled(300, **sampling))
    made = stage.gateway.stats.tokens
    start = made[WORDED.name]
    await until_async(lambda: made[WORDED.name] > start + 50, PATIENCE_S, "tokens", 0.005)
    await stage.control("drain", reason="a test")
    await stage.control("admit")
    moved = await running
    assert moved["attempts"] > 1
    assert tokens_of(moved) == tokens_of(expected)
    first, second = (
        [row["logprob"] for row in turn["choices"][0]["logprobs"]["content"]]
        for turn in (moved, expected)
    )
    assert first == pytest.approx(second, abs=1e-3)


async def test_prompt_logprobs_are_the_engines_own(stage: FeatureStage) -> None:
    ours = (await stage.sampled(2, prompt_logprobs=2))["prompt_logprobs"]
    direct = (await stage.direct(2, prompt_logprobs=2))["prompt_logprobs"]
    assert (len(ours), ours[0], direct[0]) == (len(PROMPT), None, None)
    for place, (mine, theirs) in enumerate(zip(ours[1:], direct[1:], strict=True), 1):
        assert mine.keys() == theirs.keys()
        assert str(PROMPT[place]) in mine
        for token, row in mine.items():
            assert row["logprob"] == pytest.approx(theirs[token]["logprob"], abs=1e-3)
            assert row["rank"] == theirs[token]["rank"]


async def test_the_most_likely_tokens_are_the_engines_own_through_a_drain(
    stage: FeatureStage,
) -> None:
    most, tokens = 256, 300
    url = f"http://127.0.0.1:{stage.gateway.port}"
    sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=tokens, logprobs=most)
    made = stage.gateway.stats.tokens
    start = made[WORDED.name]
    async with RolloutClient(url) as client:
        running = asyncio.create_task(client.generate(PROMPT, sampling))
        await until_async(lambda: made[WORDED.name] > start, PATIENCE_S, "tokens", 0.005)
        await stage.control("drain", reason="a test")
        await stage.control("admit")
        moved = await running
    direct = await stage.direct(tokens, logprobs=most, return_tokens_as_token_ids=True)
    assert moved.attempts > 1
    assert [*moved.token_ids] == direct["token_ids"]
    assert moved.top_logprobs is not None
    ids, logprobs = moved.top_logprobs.token_ids, moved.top_logprobs.logprobs
    assert ids.shape == logprobs.shape == (tokens, most)
    assert (ids[:, 0] == moved.token_ids).all(), "the likeliest token is the greedy one"
    for place, theirs in enumerate(direct["logprobs"]["top_logprobs"]):
        known = {int(name.removeprefix("token_id:")): value for name, value in theirs.items()}
        assert {*ids[place].tolist()} == known.keys()
        ours = [known[token] for token in ids[place].tolist()]
        assert logprobs[place].tolist() == pytest.approx(ours, abs=1e-3)


async def test_output_has_the_form_that_was_asked_for(stage: FeatureStage) -> None:
    form = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form |= {"additionalProperties": False}
    body: dict[str, Any] = {"prompt": "go", "max_tokens": 60, "temperature": 0.0}
    # White space has no end in JSON, for a model that likes it.
    wish = {"structured_outputs": {"json": form, "disable_any_whitespace": True}}
    status, answer = await stage.ask(COMPLETIONS, {**body, **wish})
    assert status == 200, answer
    assert json.loads(answer["choices"][0]["text"]).keys() == {"a"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["one"]}}}
    _, answer = await stage.ask(COMPLETIONS, {**body, "response_format": named})
    assert json.loads(answer["choices"][0]["text"]) == "one"
    _, answer = await stage.ask(COMPLETIONS, {**body, "guided_choice": ["yes", "no"]})
    assert answer["choices"][0]["text"] in ("yes", "no")
    assert answer["choices"][0]["finish_reason"] == "stop"
    status, answer = await stage.ask(COMPLETIONS, {**body, "guided_regex": "(["})
    assert status == 400
    assert "worded refuses the turn" in answer["error"]["message"]


async def test_a_deterministic_turn_is_refused_by_name_on_an_engine_that_is_not(
    stage: FeatureStage,
) -> None:
    body = {"prompt": "go", "max_tokens": 4, "temperature": 0.0, "deterministic": True}
    status, answer = await stage.ask(COMPLETIONS, body)
    assert status == 400
    line = "worded refuses the turn: deterministic: what the engine computes depends on its batch"
    assert answer["error"]["message"].startswith(line)


async def test_a_structured_turn_that_is_drained_keeps_its_form(stage: FeatureStage) -> None:
    wish = {"structured_outputs": {"regex": "(ab|cd){150}"}}
    expected = await stage.sampled(301, ignore_eos=False, **wish)
    running = asyncio.create_task(stage.sampled(301, ignore_eos=False, **wish))
    made = stage.gateway.stats.tokens
    start = made[WORDED.name]
    await until_async(lambda: made[WORDED.name] > start + 41, PATIENCE_S, "tokens", 0.005)
    await stage.control("drain", reason="a test")
    await stage.control("admit")
    moved = await running
    assert moved["attempts"] > 1
    assert tokens_of(moved) == tokens_of(expected)
    assert (len(tokens_of(moved)), moved["choices"][0]["finish_reason"]) == (301, "stop")


async def test_a_turn_ends_at_the_models_end_of_sequence(stage: FeatureStage) -> None:
    only = {"allowed_token_ids": [BYTES]}
    ended = await stage.sampled(9, ignore_eos=False, **only)
    assert (tokens_of(ended), ended["choices"][0]["finish_reason"]) == ([BYTES], "stop")
    ignored = await stage.sampled(9, **only)
    assert (tokens_of(ignored), ignored["choices"][0]["finish_reason"]) == ([BYTES] * 9, "length")


async def test_calls_of_tools_are_found_by_vllms_parser_in_a_process_of_its_own(
    stage: FeatureStage,
) -> None:
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "tools": TOOLS,
        "max_tokens": 100,
        "temperature": 0.0,
        "return_token_ids": True,
        "structured_outputs": {"regex": CALL},
    }
    status, answer = await stage.ask(CHAT, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]).keys() == {"x"}
    assert choice["token_ids"][-1] == BYTES
    _, plain = await stage.ask(CHAT, {**body, "structured_outputs": {"regex": "hello"}})
    message = plain["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == ("hello", False)


async def test_a_model_that_is_not_generative_is_asked_through_the_gateway(
    stage: FeatureStage,
) -> None:
    inputs = [[1, 2, 3], [1, 2, 3], [9, 8, 7, 6]]
    status, answer = await stage.ask("/pooling", {"input": inputs}, stage.rewards)
    assert status == 200, answer
    first, second, third = (row["data"] for row in answer["data"])
    assert first == pytest.approx(second, abs=1e-5)
    assert first != pytest.approx(third, abs=1e-3)
    assert answer["model"] == "rose-policy"
    status, answer = await stage.ask("/score", {"text_1": "ab", "text_2": "ab"}, stage.rewards)
    assert status == 200, answer
    assert answer["data"][0]["score"] == pytest.approx(1.0, abs=1e-4)
    status, answer = await stage.ask("/pooling", {"input": inputs})
    assert status == 400
    assert "worded serves no model for it" in answer["error"]["message"]
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
    status, answer = await stage.ask(GENERATE, body, stage.rewards)
    assert status == 400, "an engine without a sampler takes no turn"
