"""Stock SGLang behind the gateway: `/generate` answers as SGLang does, and turns go on there.

Without an SGLang (`sglang_python`) these tests skip.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from sglang_python import MISSING, PYTHON
from tiny_model import VOCABULARY, save_tiny_model

from rose.addresses import free_port
from rose.gateway import Gateway
from rose.gateway.settings import parse_settings
from tests.harness.tokenizer_kinds import save_byte_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON, reason=MISSING),
]

START_S = 240.0
PROMPT = [(7 * k + 3) % 90 for k in range(40)]
GREEDY = {"max_new_tokens": 24, "temperature": 0.0}
BODY = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
GENERATE = "/generate"
# Fields that SGLang measures, or makes anew for each answer; the version is the one at its start,
# which the gateway does not take for a policy version.
OWN = {
    "id",
    "e2e_latency",
    "weight_version",
    "cached_tokens",
    "cached_tokens_details",
    "total_retractions",
    "num_retractions",
    "dp_rank",
    "response_sent_to_client_ts",
    "weight_versions",
}
BAD = [
    {"input_ids": PROMPT, "text": "x"},
    {},
    {"input_ids": PROMPT, "sampling_params": {"temperature": -1.0}},
    {"input_ids": PROMPT, "sampling_params": {"top_p": 7}},
    {"input_ids": [1] * 600, "sampling_params": GREEDY},
]


@dataclass
class SglangStage:
    """Two SGLang servers, and a gateway that was given nothing but their URLs."""

    urls: list[str]
    processes: list[asyncio.subprocess.Process]
    gateway: Gateway
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def post(self, base: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(base + GENERATE, json=body) as response:
            return response.status, await response.json()

    async def events(self, base: str, body: Any) -> list[Any]:
        async with self.http.post(base + GENERATE, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def _started(root: Path, name: str) -> tuple[str, asyncio.subprocess.Process]:
    port = free_port()
    words = (
        f"-m sglang.launch_server --device cpu --attention-backend torch_native"
        f" --sampling-backend pytorch --disable-overlap-schedule --dtype float32"
        f" --mem-fraction-static 0.1 --max-total-tokens 20000 --model-path {root / 'model'}"
        f" --host 127.0.0.1 --port {port} --context-length 512 --skip-server-warmup"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with (root / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            *words.split(),
            stdout=log,
            stderr=log,
            env=environment | {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    return f"http://127.0.0.1:{port}", process


async def _ready(
    http: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> None:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            try:
                async with http.get(f"{url}/health_generate") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    pytest.fail(f"SGLang ended with code {process.returncode}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangStage]:
    root = tmp_path_factory.mktemp("sglang")
    save_tiny_model(root / "model", dtype="float32")
    save_byte_tokenizer(root / "model")
    started = [await _started(root, name) for name in ("one", "two")]
    urls = [url for url, _ in started]
    processes = [process for _, process in started]
    try:
        timeout = aiohttp.ClientTimeout(total=60)
        argv = ["--port=0", "--model-name=policy", f"--tokenizer={root / 'model'}", "--stall-s=2"]
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await asyncio.gather(*(_ready(http, *each) for each in started))
            argv += [f"--replica={url}" for url in urls]
            async with Gateway(parse_settings(argv)) as gateway:
                stage = SglangStage(urls, processes, gateway, http)
                async with asyncio.timeout(30):
                    while gateway.status().usable < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                for url in urls:
                    await stage.post(url, BODY)
                yield stage
    finally:
        for process in processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def comparable(value: Any) -> Any:
    """Return the fields that must be equal, keys in their order."""
    if isinstance(value, dict):
        return [(k, comparable(v)) for k, v in value.items() if k not in OWN]
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def without_extras(value: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's own answer."""
    return {k: v for k, v in value.items() if k not in {"versions", "segments", "attempts"}}


@pytest.mark.parametrize("logprobs", [True, False])
async def test_whole_answers_are_sglangs_own_key_by_key(stage: SglangStage, logprobs: bool) -> None:
    body = {**BODY, "return_logprob": logprobs}
    _, direct = await stage.post(stage.urls[0], body)
    status, ours = await stage.post(stage.url, body)
    assert status == 200
    assert comparable(without_extras(ours)) == comparable(direct)
    assert len(ours["output_ids"]) == GREEDY["max_new_tokens"]


async def test_streams_are_sglangs_own_event_by_event(stage: SglangStage) -> None:
    direct = await stage.events(stage.urls[0], BODY)
    ours = await stage.events(stage.url, BODY)
    assert comparable(without_extras(ours[-1])) == comparable(direct[-1])
    by_length = {len(event["output_ids"]): event for event in direct}
    for event in ours[:-1]:
        theirs = by_length.get(len(event["output_ids"]))
        if theirs is not None:
            assert comparable(without_extras(event)) == comparable(theirs)


async def test_text_in_and_out_is_sglangs(stage: SglangStage) -> None:
    body = {"text": "Hello", "sampling_params": GREEDY}
    _, direct = await stage.post(stage.urls[0], body)
    status, ours = await stage.post(stage.url, body)
    assert (status, ours["text"]) == (200, direct["text"])


@pytest.mark.parametrize("case", range(len(BAD)))
async def test_bad_requests_get_sglangs_status(stage: SglangStage, case: int) -> None:
    theirs, direct = await stage.post(stage.urls[0], BAD[case])
    status, ours = await stage.post(stage.url, BAD[case])
    assert status == theirs, (direct, ours)
    if status != 200:
        assert ours["error"]["message"]


async def test_turns_outlive_a_killed_sglang_token_for_token(stage: SglangStage) -> None:
    prompts = [[(5 * k + 11 * turn + 1) % VOCABULARY for k in range(30)] for turn in range(6)]
    sampling = {**GREEDY, "max_new_tokens": 300}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    expected = [(await stage.post(stage.urls[0], body))[1]["output_ids"] for body in bodies]
    running = [asyncio.create_task(stage.post(stage.url, body)) for body in bodies]
    names = [url.removeprefix("http://") for url in stage.urls]
    stats = stage.gateway.stats
    before = dict(stats.tokens)

    def made(name: str) -> int:
        return stats.tokens[name] - before.get(name, 0)

    # All may be on one of them, whichever looked the faster.
    async with asyncio.timeout(60):
        while max(map(made, names)) < 60:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    busiest = names.index(max(names, key=made))
    os.killpg(stage.processes[busiest].pid, signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert [answer["output_ids"] for _, answer in answers] == expected
    assert any(len(answer["segments"]) == 2 for _, answer in answers)
    assert all(answer["versions"] == [] for _, answer in answers)
