"""Clients that others wrote, against the gateway over a real replica.

The OpenAI SDK is installed and used as it is. `verifiers` and TRL are used where they are
installed; what they send and what they insist on is also written out here, from their sources
(renderers 0.1.12, which verifiers 0.4.0 calls, and trl 1.16.0), and always tested.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from engine_specs import LEFT
from pool import Started
from tiny_model import VOCABULARY

from rose.client import BlockingRolloutClient, RequestRefused, RolloutClient, Sampling
from rose.gateway import Gateway
from rose.gateway.settings import parse_settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(LEFT),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

MODEL = "policy"
PROMPT = [(7 * k + 3) % VOCABULARY for k in range(40)]
TOKENS = 24
CHAT = [{"role": "user", "content": "Hello"}]
EXTRA = {"ignore_eos": True, "temperature": 0.0}


@dataclass
class ConformanceStage:
    """One real replica, admitted, and a gateway before it."""

    url: str
    # The greedy tokens of PROMPT and their logprobs.
    tokens: list[int]
    logprobs: list[float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    engines: list[Started], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ConformanceStage]:
    (replica,) = engines
    argv = ["--port=0", f"--model-name={MODEL}", f"--tokenizer={replica.spec.model_dir}"]
    argv += ["--stall-s=5", f"--replica=r=dedicated={replica.url}"]
    argv += [f"--batch-dir={tmp_path_factory.mktemp('batches')}"]
    async with Gateway(parse_settings(argv)) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        async with RolloutClient(url) as client:
            turn = await client.generate(PROMPT, Sampling(temperature=0.0, max_tokens=TOKENS))
        assert len(set(turn.token_ids)) > 4, "a degenerate model would make all this empty"
        yield ConformanceStage(url, [*turn.token_ids], [*turn.logprobs])


@pytest.fixture
def sdk(stage: ConformanceStage) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0)


async def test_openai_sdk_completions_are_the_replicas_tokens(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    answer = await sdk.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0.0,
        logprobs=1,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        extra_headers={"X-Session-ID": "sdk"},
    )
    choice = answer.choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == stage.tokens
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in stage.tokens]
    assert choice.logprobs.token_logprobs == pytest.approx(stage.logprobs, abs=1e-3)
    assert (choice.finish_reason, answer.model) == ("length", MODEL)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.prompt_tokens == len(PROMPT)


async def test_openai_sdk_runs_a_batch(stage: ConformanceStage, sdk: openai.AsyncOpenAI) -> None:
    bodies = [
        {"model": MODEL, "messages": CHAT, "max_tokens": 8, **EXTRA},
        {"model": MODEL, "messages": CHAT, "max_tokens": -1},
    ]
    route = "/v1/chat/completions"
    asked = [
        {"custom_id": f"ask-{k}", "method": "POST", "url": route, "body": body}
        for k, body in enumerate(bodies)
    ]
    text = "\n".join(json.dumps(each) for each in asked).encode()
    file = await sdk.files.create(file=("asks.jsonl", text), purpose="batch")
    batch = await sdk.batches.create(
        input_file_id=file.id, endpoint=route, completion_window="24h", metadata={"for": "test"}
    )
    async with asyncio.timeout(60):
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            batch = await sdk.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    (answered,) = (await sdk.files.content(batch.output_file_id)).text.splitlines()
    (failed,) = (await sdk.files.content(batch.error_file_id)).text.splitlines()
    alone = await sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, extra_body=EXTRA
    )
    response = json.loads(answered)["response"]["body"]
    assert response["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert json.loads(failed)["response"]["status_code"] == 400
    assert [each.id async for each in sdk.batches.list(limit=1)] == [batch.id]
    assert (await sdk.files.delete(file.id)).deleted


async def test_openai_sdk_streams_add_up_to_the_whole_answer(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Onceuponatime",
        "max_tokens": TOKENS,
        "temperature": 0.0,
    }
    whole = await sdk.completions.create(**asked)
    chunks = [
        chunk
        async for chunk in await sdk.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert len(chunks) > 3
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS


async def test_openai_sdk_chats_streamed_and_whole(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": CHAT,
        "max_completion_tokens": TOKENS,
        "temperature": 0.0,
    }
    whole = await sdk.chat.completions.create(**asked, logprobs=True)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or ()) == TOKENS
    stream = await sdk.chat.completions.create(**asked, stream=True)
    parts = [choice.delta async for chunk in stream for choice in chunk.choices]
    assert parts[0].role == "assistant"
    assert "".join(part.content or "" for part in parts) == message.content


async def test_openai_sdk_samples_several_choices(
    sdk: openai.AsyncOpenAI, stage: ConformanceStage
) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1


async def test_openai_sdk_raises_its_own_errors(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        await sdk.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError):
        await sdk.completions.create(model=MODEL, prompt=[1] * 4_000)
    with pytest.raises(openai.BadRequestError):
        await sdk.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert [model.id async for model in sdk.models.list()] == [MODEL]


async def test_openai_sdk_that_closes_its_stream_ends_the_turn(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    stream = await sdk.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=400, temperature=0.0, stream=True
    )
    await anext(stream)
    await stream.close()
    async with httpx.AsyncClient(base_url=stage.url) as http:
        for _ in range(200):
            live = (await http.get("/rose/v1/stats")).json()["live_turns"]
            if not any(live.values()):
                return
            await asyncio.sleep(0.01)
    raise AssertionError(f"the turn goes on: {live}")


def _unused(stage: ConformanceStage) -> int:
    """A stop token that the greedy answer never comes to."""
    return next(token for token in range(VOCABULARY) if token not in stage.tokens)


def _train_client_request(stage: ConformanceStage, **more: Any) -> dict[str, Any]:
    """Post field for field like `renderers.client.generate` for verifiers' TrainClient."""
    sampling = {
        "temperature": 0.0,
        "max_tokens": TOKENS,
        "routed_experts_prompt_start": 0,
        "stop_token_ids": [_unused(stage)],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    return {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling, **more}


async def test_verifiers_train_client_request_as_its_source_has_it(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    """renderers.client: AsyncOpenAI.post to the server's root, raw answer, then these checks."""
    response = await sdk.post(
        f"{stage.url}/inference/v1/generate",
        cast_to=httpx.Response,
        body=_train_client_request(stage, cache_salt="step-3", priority=2),
        options={"headers": {"X-Session-ID": "rollout-1"}},
    )
    data = response.json()
    choice = data["choices"][0]
    assert isinstance(data["request_id"], str)
    assert choice["token_ids"] == stage.tokens
    assert choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    # `_parse_completion_logprobs` raises MalformedGenerateResponseError for anything else.
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in stage.tokens]
    logprobs = [entry["logprob"] for entry in content]
    assert logprobs == pytest.approx(stage.logprobs, abs=1e-3)
    assert -9999.0 not in logprobs


async def test_verifiers_train_client_itself(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    client = pytest.importorskip("renderers.client", reason="renderers is not installed")

    class Renderer:
        """The part of a renderer that `generate` uses once the prompt is token ids."""

        def get_stop_token_ids(self) -> list[int]:
            return [_unused(stage)]

        def parse_response(self, completion_ids: list[int], **kwargs: Any) -> Any:
            class Parsed:
                content, reasoning_content, tool_calls = "x", None, ()
                reasoning_complete = True

            return Parsed()

    result = await client.generate(
        client=sdk,
        renderer=Renderer(),
        messages=[],
        model=MODEL,
        prompt_ids=PROMPT,
        sampling_params={"temperature": 0.0, "max_tokens": TOKENS},
        extra_headers={"X-Session-ID": "rollout-2"},
    )
    assert result["completion_ids"] == stage.tokens
    assert result["completion_logprobs"] == pytest.approx(stage.logprobs, abs=1e-3)
    with pytest.raises(client.OverlongPromptError):
        await client.generate(
            client=sdk, renderer=Renderer(), messages=[], model=MODEL, prompt_ids=[1] * 4_000
        )


TRL_PROMPTS = [PROMPT, PROMPT[:20]]
TRL_SAMPLING = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 8,
    "logprobs": 0,
}


async def test_trl_completions_as_its_source_has_them(stage: ConformanceStage) -> None:
    """VLLMClient.generate: several prompts, n of each, choices with the n of a prompt together."""
    payload = {
        "model": MODEL,
        "prompt": TRL_PROMPTS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **TRL_SAMPLING,
    }
    async with httpx.AsyncClient(base_url=stage.url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == MODEL
        answer = await http.post("/v1/completions", json=payload)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == TRL_PROMPTS
    for choice in choices:
        logprobs = choice["logprobs"]
        assert len(choice["token_ids"]) == 8
        assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(value <= 0 for value in logprobs["token_logprobs"])
        assert len(logprobs["top_logprobs"]) == 8


async def test_trl_client_itself(stage: ConformanceStage) -> None:
    trl = pytest.importorskip("trl.generation.vllm_client", reason="TRL is not installed")

    def use() -> dict[str, Any]:
        client = trl.VLLMClient(base_url=stage.url, connection_timeout=10)
        options = {key: value for key, value in TRL_SAMPLING.items() if key != "n"}
        return dict(client.generate(TRL_PROMPTS, n=2, **options))

    result = await asyncio.to_thread(use)
    assert result["prompt_ids"] == TRL_PROMPTS
    assert [len(ids) for ids in result["completion_ids"]] == [8] * 4
    for ids, sampled in zip(result["completion_ids"], result["logprob_token_ids"], strict=True):
        assert [position[0] for position in sampled] == ids


async def test_plain_sglang_generate_calls(stage: ConformanceStage) -> None:
    """The requests of slime and of SGLang's own clients, whole and streamed."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS},
        "return_logprob": True,
        "rid": "slime-1",
    }
    async with httpx.AsyncClient(base_url=stage.url, timeout=60) as http:
        answer = (await http.post("/generate", json=body)).json()
        batch = await http.post("/generate", json={**body, "rid": None, "input_ids": [PROMPT] * 2})
        async with http.stream(
            "POST", "/generate", json={**body, "rid": "slime-2", "stream": True}
        ) as stream:
            lines = [line[6:] async for line in stream.aiter_lines() if line.startswith("data: ")]
        refused = await http.post("/generate", json={"sampling_params": {}})
    meta = answer["meta_info"]
    assert (answer["output_ids"], meta["id"]) == (stage.tokens, "slime-1")
    assert meta["finish_reason"] == {"type": "length", "length": TOKENS}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == stage.tokens
    values = [entry[0] for entry in meta["output_token_logprobs"]]
    assert values == pytest.approx(stage.logprobs, abs=1e-3)
    assert [one["output_ids"] for one in batch.json()] == [stage.tokens] * 2
    assert lines[-1] == "[DONE]"
    parts = [httpx.Response(200, text=line).json() for line in lines[:-1]]
    outputs = [part["output_ids"] for part in parts]
    assert len(outputs) > 3
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(outputs))
    assert outputs[-1] == stage.tokens
    assert refused.status_code == 400


async def test_rose_client_whole_streamed_grouped_and_in_sessions(stage: ConformanceStage) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=TOKENS)
    async with RolloutClient(stage.url) as client:
        async with client.session("traj") as session:
            turn = await session.generate(PROMPT, greedy)
            async with session.stream(PROMPT, greedy) as stream:
                chunks = [chunk async for chunk in stream]
        assert [*turn.token_ids] == stage.tokens
        assert [t for chunk in chunks for t in chunk.token_ids] == stage.tokens
        assert {chunk.version for chunk in chunks} == {0}
        assert stream.turn.versions == turn.versions == ((0, 0, TOKENS),)
        assert stream.turn.segments == turn.segments == (("r", "dedicated", 0, TOKENS),)
        async with client.gather_group(PROMPT, greedy, 3, need=2) as group:
            members = [member async for member in group]
        assert [[*m.turn.token_ids] for m in members if m.turn] == [stage.tokens] * 2
        with pytest.raises(RequestRefused, match="token"):
            await client.generate([1] * 4_000, greedy)


async def test_rose_client_without_a_loop(stage: ConformanceStage) -> None:
    def use() -> list[int]:
        with BlockingRolloutClient(stage.url) as client:
            greedy = Sampling(temperature=0.0, max_tokens=TOKENS)
            return [t for chunk in client.stream(PROMPT, greedy) for t in chunk.token_ids]

    assert await asyncio.to_thread(use) == stage.tokens


async def test_anthropics_and_openais_agent_apis_go_on_from_the_sampled_tokens(
    stage: ConformanceStage, sdk: openai.AsyncOpenAI
) -> None:
    """One session over both APIs: each answer is what the replica samples after the kept tokens."""
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    session = {"X-Session-ID": "agent"}
    async with anthropic.AsyncAnthropic(
        base_url=stage.url, api_key="-", max_retries=0, default_headers=session
    ) as client:
        first = await client.messages.create(
            model=MODEL, max_tokens=TOKENS, messages=CHAT, extra_body=EXTRA
        )
        said = [*CHAT, {"role": "assistant", "content": first.content[0].model_dump()["text"]}]
        async with client.messages.stream(
            model=MODEL, max_tokens=TOKENS, messages=[*said, *CHAT], extra_body=EXTRA
        ) as events:
            second = await events.get_final_message()
    third = await sdk.responses.create(
        model=MODEL,
        max_output_tokens=TOKENS,
        previous_response_id=second.id,
        input="Hello",
        extra_headers=session,
        extra_body=EXTRA,
    )
    assert third.model_extra is not None
    assert third.model_extra["trajectory"]["turn"] == 2
    async with RolloutClient(stage.url) as client:
        (found,) = await client.trajectories("agent")
        for turn in found.turns:
            sampling = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            alone = await client.generate(found.token_ids[: turn.start], sampling)
            assert found.token_ids[turn.start : turn.end] == alone.token_ids
            assert found.logprobs[turn.start : turn.end] == pytest.approx(alone.logprobs, abs=1e-3)
    assert [turn.end - turn.start for turn in found.turns] == [TOKENS] * 3
    assert sum(found.loss_mask) == 3 * TOKENS
    assert {span.version for span in found.versions} == {0}
