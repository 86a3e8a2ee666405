"""Images through the gateway and a real engine: vLLM's own answers and those of the trainer's
model, wherever a turn goes on and whatever part of the weights an update brings."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_specs import SEEING, STOCK_SEEING
from msgspec import structs
from pool import Started

from elastic_scheduler import ReplicaKind
from rose.client import RolloutClient, Sampling, Turn
from rose.engines import EngineKind
from rose.gateway import Gateway, GatewaySettings, StaticReplica
from rose.gateway.replicas import static
from tests.harness.tokenizer_kinds import ids_of
from tests.harness.vision_model import IMAGE, IMAGE_LENGTH, QWEN_IMAGE_LENGTH, picture
from tests.harness.waiting import until_async
from weight_transfer.format.tensors import TensorBits, tensor_bits, tensor_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(SEEING, STOCK_SEEING),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

CHAT = "/v1/chat/completions"
CAT, DOG = picture(1), picture(2)
PROMPT = [*ids_of("<user>see "), IMAGE, *ids_of(" it<assistant>")]

TOKENS = 24
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PATIENCE_S = 60.0


@dataclass
class ImageStage:
    """The replica behind a gateway, perhaps an engine without ROSE, and the length of an image."""

    replica: Started
    stock: Started | None
    image_length: int
    gateway: Gateway
    client: RolloutClient
    http: aiohttp.ClientSession

    async def chat(self, url: str, model: str, data: bytes) -> tuple[list[int], list[int]]:
        """Return prompt and tokens of a chat that shows an image."""
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        texts = [{"type": "text", "text": text} for text in ("see ", " it")]
        shown = {"type": "image_url", "image_url": {"url": source}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": [texts[0], shown, texts[1]]}],
            "max_tokens": TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self.http.post(url + CHAT, json=body) as answer:
            assert answer.status == 200, await answer.text()
            made = await answer.json()
        return made["prompt_token_ids"], made["choices"][0]["token_ids"]

    async def control(self, what: str, **body: Any) -> dict[str, Any]:
        url = f"{self.replica.url}/rose/v1/{what}"
        asked = body or {"epoch": next(self.replica.epochs)}
        async with self.http.post(url, json=asked, headers=self.replica.headers) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(engines: list[Started]) -> AsyncIterator[ImageStage]:
    seeing, stock = (*engines, None)[:2]
    assert seeing is not None
    length = IMAGE_LENGTH if seeing.of.engine is EngineKind.VLLM else QWEN_IMAGE_LENGTH
    row = StaticReplica(seeing.spec.name, ReplicaKind.DEDICATED, seeing.url, 32)
    settings = GatewaySettings(
        port=0,
        replicas=(row,),
        max_attempts=24,
        text_timeout_s=60.0,
        tokenizer=seeing.spec.model_dir,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "POLL_S", 0.05)
        async with Gateway(settings) as gateway:
            url = f"http://127.0.0.1:{gateway.port}"
            async with RolloutClient(url) as client, aiohttp.ClientSession() as http:
                await until_async(lambda: gateway.status().usable, PATIENCE_S, "it is found", 0.05)
                yield ImageStage(seeing, stock, length, gateway, client, http)


def trainers_model(folder: Path, weights: dict[str, TensorBits]) -> Any:
    """Return transformers' model with these weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    with TemporaryDirectory() as made:
        tensors = {name: tensor_of(bits).contiguous() for name, bits in weights.items()}
        save_file(tensors, Path(made) / "model.safetensors", {"format": "pt"})
        copy(folder / "config.json", made)
        return AutoModelForImageTextToText.from_pretrained(made, dtype=torch.float32)


def trainers_input(folder: Path, prompt: list[int], files: list[bytes]) -> dict[str, Any]:
    """Return what transformers' model takes: a prompt, and its images as they are processed."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor

    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in files]
    seen = dict(AutoImageProcessor.from_pretrained(folder)([images], return_tensors="pt"))
    ids = torch.tensor([prompt])
    if "image_grid_thw" in seen:
        seen["mm_token_type_ids"] = (ids == IMAGE).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **seen}


def trainers_own(
    folder: Path, prompt: list[int], files: list[bytes], weights: dict[str, TensorBits]
) -> list[int]:
    """Return the greedy tokens of transformers' model with these weights."""
    made = trainers_model(folder, weights).generate(
        **trainers_input(folder, prompt, files),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return [*map(int, made[0, len(prompt) :])]


def written(folder: Path, files: list[bytes], text: str) -> list[int]:
    """Return the prompt that the trainer's processor writes."""
    from PIL import Image
    from transformers import AutoProcessor

    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in files]
    processor = AutoProcessor.from_pretrained(folder)
    return [*map(int, processor(text=text, images=images)["input_ids"][0])]


async def test_greedy_tokens_are_vllms_own_and_the_trainers(stage: ImageStage) -> None:
    folder, stock = stage.replica.spec.model_dir, stage.stock
    assert stock is not None
    url = f"http://127.0.0.1:{stage.gateway.port}"
    found = []
    for data in (CAT, DOG):
        turn = await stage.client.generate(PROMPT, GREEDY, images=[data])
        prompt, tokens = [*(turn.prompt_token_ids or ())], [*turn.token_ids]
        assert prompt == written(folder, [data], "<user>see <image> it<assistant>")
        again = await stage.client.generate(prompt, GREEDY, images=[data])
        assert ([*(again.prompt_token_ids or ())], [*again.token_ids]) == (prompt, tokens)
        assert await stage.chat(url, "rose-policy", data) == (prompt, tokens)
        assert await stage.chat(stock.url, STOCK_SEEING.name, data) == (prompt, tokens)
        assert tokens == trainers_own(folder, prompt, [data], stage.replica.versions.base)
        found.append(tokens)
    assert found[0] != found[1], "else the image does not matter"


async def test_a_turn_that_is_drained_is_the_turn_that_was_not(stage: ImageStage) -> None:
    long = structs.replace(GREEDY, max_tokens=300)
    expected = await stage.client.generate(PROMPT, long, images=[DOG])
    made, name = stage.gateway.stats.tokens, stage.replica.of.name
    start = made[name]
    running = asyncio.create_task(stage.client.generate(PROMPT, long, images=[DOG]))
    await until_async(lambda: made[name] > start + 20, PATIENCE_S, "tokens", 0.005)
    await stage.control("drain")
    await stage.control("admit")
    moved = await running
    assert moved.attempts > 1
    assert moved.token_ids == expected.token_ids
    assert moved.prompt_token_ids == expected.prompt_token_ids
    assert moved.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


async def test_a_trajectory_goes_on_from_its_tokens_with_one_more_image(stage: ImageStage) -> None:
    folder = stage.replica.spec.model_dir
    async with stage.client.session() as session:
        first = await session.generate(PROMPT, structs.replace(GREEDY, max_tokens=5), images=[CAT])
        kept = [*(first.prompt_token_ids or ()), *first.token_ids]
        assert IMAGE not in first.token_ids
        more = [*kept, *ids_of("<user>and "), IMAGE, *ids_of("<assistant>")]
        second = await session.generate(more, GREEDY, images=[CAT, DOG])
    prompt = [*(second.prompt_token_ids or ())]
    assert (prompt[: len(kept)], len(prompt)) == (kept, len(more) + stage.image_length - 1)
    weights = stage.replica.versions.base
    assert [*second.token_ids] == trainers_own(folder, prompt, [CAT, DOG], weights)


@pytest.mark.parametrize("frozen", [("vis", "connector"), ()], ids=["language", "whole"])
async def test_an_update_is_proven_and_turns_go_on_under_it(
    stage: ImageStage, frozen: tuple[str, ...]
) -> None:
    import torch

    versions, folder = stage.replica.versions, stage.replica.spec.model_dir
    before = await stage.client.generate(PROMPT, GREEDY, images=[CAT])
    torch.manual_seed(7)
    new = {
        name: bits
        if any(part in name for part in frozen)
        else tensor_bits(name, tensor_of(bits) + 0.05 * torch.randn(bits.shape))
        for name, bits in versions.active.items()
    }
    over: list[Turn] = []

    async def turns(length: int) -> None:
        """Run turn after turn until one of them has tokens of both versions."""
        while not over:
            long = structs.replace(GREEDY, max_tokens=length)
            made = await stage.client.generate(PROMPT, long, images=[CAT])
            over.extend([made] if len(made.versions) > 1 else [])

    # They end at other moments, so some of them run when the version changes.
    running = asyncio.gather(*[turns(length) for length in (190, 250, 310, 370)])
    report = await stage.control("weights/apply", **versions.next(new))
    try:
        assert (report["digest_ok"], report["probe_ok"]) == (True, True), report
        await asyncio.wait_for(running, PATIENCE_S)
        turn = await stage.client.generate(PROMPT, GREEDY, images=[CAT])
    finally:
        await stage.control("weights/apply", **versions.next(versions.base))
    assert turn.versions == ((versions.version - 1, 0, TOKENS),)
    assert turn.token_ids != before.token_ids
    prompt = [*(turn.prompt_token_ids or ())]
    assert [*turn.token_ids] == trainers_own(folder, prompt, [CAT], new)
    # The running turn is computed anew, its image too.
    (_, _, changed), (_, begun, _) = over[0].versions
    assert changed == begun
    so_far = [*prompt, *over[0].token_ids[:begun]]
    rest = [*over[0].token_ids[begun:]][:TOKENS]
    assert rest == trainers_own(folder, so_far, [CAT], new)[: len(rest)]


async def test_a_prompt_longer_than_the_model_is_the_engines_line(stage: ImageStage) -> None:
    images = [IMAGE] * 16
    url = f"http://127.0.0.1:{stage.gateway.port}/inference/v1/generate"
    data = [base64.b64encode(CAT).decode()] * len(images)
    body = {"token_ids": images, "images": data, "sampling_params": {"max_tokens": 1}}
    async with stage.http.post(url, json=body) as answer:
        assert answer.status == 400
        line = (await answer.json())["error"]["message"]
    assert "\n" not in line
    assert str(len(images) * IMAGE_LENGTH) in line, line
