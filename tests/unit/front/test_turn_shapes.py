"""Bodies of the trainers' turns, as their clients write them, are what the gateway reads."""

import json

import pytest

from rose.gateway.apis import CompletionFrontend, SglangFrontend, VllmFrontend
from rose.gateway.apis.frontend import ApiFrontend
from rose.gateway.text_codec import ServedModel

SLIME = {
    "sampling_params": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 6,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    },
    "return_logprob": True,
    "input_ids": [1, 2],
}
AREAL = {
    "input_ids": [1, 2],
    "image_data": None,
    "sampling_params": {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_new_tokens": 6,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    },
    "return_logprob": True,
    "stream": False,
}
AREAL_VLLM = {
    "top_p": 1.0,
    "top_k": 100_000_000,
    "max_tokens": 6,
    "temperature": 1.0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_tokens_as_token_ids": True,
    "logprobs": 0,
    "use_beam_search": False,
    "stream": False,
    "prompt": [1, 2],
}
PRIME_RL = {
    "model": "m",
    "token_ids": [1, 2],
    "sampling_params": {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "logprobs": 1},
    "cache_salt": "3",
}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (SglangFrontend, SLIME),
        (SglangFrontend, AREAL),
        (CompletionFrontend, AREAL_VLLM),
        (VllmFrontend, PRIME_RL),
    ],
    ids=["slime", "areal", "areal-vllm", "prime-rl"],
)
async def test_a_turn_is_read_as_its_trainer_writes_it(
    api: type[ApiFrontend], body: dict[str, object]
) -> None:
    model = ServedModel("m", 512, None)
    asked = await api(model, 16).read(json.dumps(body).encode(), {})  # type: ignore[call-arg]
    (turn,) = asked.turns
    assert (turn.token_ids, turn.sampling.max_tokens) == ([1, 2], 6)
