"""The gateway answers generated requests as real vLLM does, over tokenizers of each kind."""

import asyncio
import random

import aiohttp
import pytest
from api_requests import Comparison, ask, request
from pool import PoolSpec, Started

from rose.engines import EngineRole
from rose.gateway import Gateway
from rose.gateway.settings import parse_settings
from tests.harness.conversations import TEMPLATES
from tests.harness.tokenizer_kinds import KINDS
from tests.harness.waiting import until_async

REQUESTS = 1_250
AT_ONCE = 8
SPECS = [
    PoolSpec(
        f"text-{number}",
        EngineRole.STOCK,
        served="policy",
        tokenizer=f"{kind}/{template}",
        args=("--enable-scale-out",),
    )
    for number, (kind, template) in enumerate(zip(KINDS, TEMPLATES, strict=True))
]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.engines(*SPECS),
    pytest.mark.timeout(1_200),
]


@pytest.mark.parametrize("number", range(len(SPECS)), ids=list(KINDS))
async def test_generated_requests_are_answered_as_by_vllm(
    engines: list[Started], number: int
) -> None:
    engine = engines[number]
    tokenizer = KINDS[list(KINDS)[number]]()
    vocabulary = tokenizer.get_vocab_size() + 1
    whole = max(k for k in range(vocabulary) if tokenizer.decode([k]).strip() == "a")
    rng, result = random.Random(4_400 + number), Comparison()
    asked = [request(rng, vocabulary, whole) for _ in range(REQUESTS)]
    argv = ["--port=0", "--model-name=policy", f"--tokenizer={engine.spec.model_dir}/tokenizer"]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
        Gateway(parse_settings([*argv, f"--replica={engine.url}"])) as gateway,
    ):
        await until_async(lambda: gateway.status().usable == 1, 30, "it is found", 0.05)

        async def compare(caller: int) -> None:
            for path, body in asked[caller::AT_ONCE]:
                theirs = await ask(http, engine.url + path, body)
                ours = await ask(http, f"http://127.0.0.1:{gateway.port}{path}", body)
                result.add(path, body, theirs, ours)

        await asyncio.gather(*map(compare, range(AT_ONCE)))
    assert not result.differing, f"{len(result.differing)}:\n" + "\n".join(result.differing[:3])
    assert result.alike[200] > REQUESTS / 4
