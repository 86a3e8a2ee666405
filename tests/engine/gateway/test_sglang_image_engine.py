"""Images through the gateway and a real guest on SGLang: the answers of the trainer's model, in the
tests of `test_image_engine` and for what SGLang does in its own way."""

import asyncio
import json
from hashlib import sha256

import pytest
from engine_specs import SEEING_GUEST
from msgspec import structs
from sglang_python import MISSING, PYTHON
from test_image_engine import (
    CAT,
    DOG,
    GREEDY,
    PROMPT,
    ImageStage,
    stage,
    test_a_trajectory_goes_on_from_its_tokens_with_one_more_image,
    test_a_turn_that_is_drained_is_the_turn_that_was_not,
    test_an_update_is_proven_and_turns_go_on_under_it,
    trainers_input,
    trainers_model,
    trainers_own,
)

from tests.harness.vision_model import IMAGE, QWEN_IMAGE_LENGTH

__all__ = (
    "stage",
    "test_a_trajectory_goes_on_from_its_tokens_with_one_more_image",
    "test_a_turn_that_is_drained_is_the_turn_that_was_not",
    "test_an_update_is_proven_and_turns_go_on_under_it",
)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(*((SEEING_GUEST,) if PYTHON else ())),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not PYTHON, reason=MISSING),
]


async def prompt_logprobs(stage: ImageStage, data: bytes) -> list[float]:
    """Return the logprobs of the prompt with an image that the gateway has sent to the replica."""
    body = {
        "request_id": "prompt",
        "token_ids": PROMPT,
        "images": [sha256(data).hexdigest()],
        "sampling": {"max_tokens": 1, "prompt_logprobs": 0},
    }
    async with stage.http.post(f"{stage.replica.url}/rose/v1/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = [json.loads(line) async for line in answer.content]
    places = [place for line in lines for place in line.get("prompt_logprobs") or ()]
    return [place[0][1] for place in places if place]


async def test_greedy_tokens_and_logprobs_are_the_trainers(stage: ImageStage) -> None:
    import torch

    folder, weights = stage.replica.spec.model_dir, stage.replica.versions.base
    place = PROMPT.index(IMAGE)
    expected = [*PROMPT[:place], *[IMAGE] * QWEN_IMAGE_LENGTH, *PROMPT[place + 1 :]]
    model, found = trainers_model(folder, weights), []
    for data in (CAT, DOG):
        turn = await stage.client.generate(PROMPT, GREEDY, images=[data])
        prompt, tokens = [*(turn.prompt_token_ids or ())], [*turn.token_ids]
        assert prompt == expected
        again = await stage.client.generate(prompt, GREEDY, images=[data])
        assert ([*(again.prompt_token_ids or ())], [*again.token_ids]) == (prompt, tokens)
        assert tokens == trainers_own(folder, prompt, [data], weights)
        with torch.no_grad():
            logits = model(**trainers_input(folder, prompt, [data])).logits[0].float()
        rows = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
        assert await prompt_logprobs(stage, data) == pytest.approx(rows[:, 0].tolist(), abs=1e-3)
        found.append(tokens)
    assert found[0] != found[1], "else the image does not matter"


async def test_a_sampled_placeholder_is_no_place_and_changes_no_position(stage: ImageStage) -> None:
    kept = await stage.client.generate([*PROMPT, 7], GREEDY, images=[CAT])
    prompt = [*(kept.prompt_token_ids or ()), IMAGE, 9]
    turn = await stage.client.generate(prompt, GREEDY, images=[CAT])
    assert [*(turn.prompt_token_ids or ())] == prompt
    again = await stage.client.generate([*PROMPT, 7, 8, 9], GREEDY, images=[CAT])
    assert turn.token_ids != again.token_ids


async def test_tokens_are_the_same_while_kv_memory_leaves_and_comes_back(stage: ImageStage) -> None:
    long = structs.replace(GREEDY, max_tokens=200)

    async def turns() -> list[tuple[int, ...]]:
        asked = [stage.client.generate(PROMPT, long, images=[each]) for each in (CAT, DOG) * 3]
        return [tuple(turn.token_ids) for turn in await asyncio.gather(*asked)]

    expected, node, seen = await turns(), stage.replica.node, set()
    running = asyncio.create_task(turns())
    for cap in (2, 0) * 4:
        node.kv_granule_cap = cap
        await asyncio.sleep(0.1)
        guest = stage.replica.control.guest.peek()
        seen.add(guest and guest.granules_mapped)
    node.reset()
    assert await running == expected
    assert len(seen) > 1
