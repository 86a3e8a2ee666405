"""Batches as trainers send them: hundreds of completions in one request, and names of models."""

import asyncio
from typing import Any

import aiohttp
import pytest
from gateway_cases import base_url, entry, gateway_with, until
from wire_cases import VLLM, ask, vllm_body

from rose.errors import ConfigError
from rose.gateway.settings import GatewaySettings, parse_settings
from tests.fakes.replica import StandInReplica

COMPLETIONS = "/v1/completions"


def batch(prompts: int, samples: int, **fields: Any) -> dict[str, Any]:
    """The body of TRL's server mode: token prompts, each sampled several times."""
    return {
        "model": "trained/model",
        "prompt": [[1, 100 + k] for k in range(prompts)],
        "n": samples,
        "max_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        **fields,
    }


async def test_512_completions_of_one_request_are_answered_in_their_order() -> None:
    async with (
        StandInReplica() as one,
        StandInReplica() as two,
        gateway_with(entry(one, "own-0"), entry(two, "own-1"), model_names=("*",)) as gw,
        aiohttp.ClientSession(base_url(gw)) as session,
    ):
        status, answer, _ = await ask(session, COMPLETIONS, batch(64, 8))
    assert status == 200
    assert len(one.requests) + len(two.requests) == 512
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert found == [[101 + k, 102 + k] for k in range(64) for _ in range(8)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(512))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, batch(3, 3)),
        (COMPLETIONS, batch(9, 1)),
        (VLLM, vllm_body(2, sampling={"n": 9})),
        ("/generate", {"input_ids": [[1]] * 9, "sampling_params": {"max_new_tokens": 2}}),
    ],
)
async def test_more_completions_than_allowed_are_refused_in_a_line_that_names_the_limit(
    path: str, body: Any
) -> None:
    async with (
        gateway_with(model_names=("*",), max_completions=8) as gw,
        aiohttp.ClientSession(base_url(gw)) as session,
    ):
        status, answer, _ = await ask(session, path, body)
    assert status == 400
    message = answer["error"]["message"]
    assert "9 completions" in message
    assert "--max-completions" in message
    assert "\n" not in message


async def test_a_batch_waits_for_its_places_as_long_as_tokens_come() -> None:
    """Two slow replicas take many times longer than one turn may wait for a place."""
    limits = {"queue_wait_s": 0.1, "version_wait_s": 0.1, "model_names": ("*",)}
    async with StandInReplica(delay_s=0.005) as one, StandInReplica(delay_s=0.005) as two:
        rows = entry(one, "own-0", max_sequences=2), entry(two, "own-1", max_sequences=2)
        async with (
            gateway_with(*rows, **limits) as gw,
            aiohttp.ClientSession(base_url(gw)) as session,
        ):
            whole = asyncio.create_task(ask(session, COMPLETIONS, batch(10, 10)))
            await until(lambda: gw.status().waiting > 90)
            # Of its own a turn waits no longer than ever.
            alone, _, _ = await ask(session, VLLM, vllm_body(2, priority=9))
            status, answer, _ = await whole
    assert (alone, status, len(answer["choices"])) == (503, 200, 100)


async def test_a_batch_whose_replicas_make_nothing_is_given_up() -> None:
    async with StandInReplica() as replica:
        replica.hang_after = 1
        row = entry(replica, "own-0", max_sequences=1)
        async with (
            gateway_with(row, queue_wait_s=0.1, model_names=("*",)) as gw,
            aiohttp.ClientSession(base_url(gw)) as session,
        ):
            status, answer, headers = await ask(session, COMPLETIONS, batch(4, 1))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "no replica was free" in answer["error"]["message"]


async def test_every_name_that_was_given_is_listed_and_others_are_refused_by_name() -> None:
    names = ("policy", "org/Model-7B")
    async with (
        StandInReplica() as replica,
        gateway_with(entry(replica, "own-0"), model_names=names) as gw,
        aiohttp.ClientSession(base_url(gw)) as session,
    ):
        cards = (await (await session.get("/v1/models")).json())["data"]
        taken = [(await ask(session, VLLM, vllm_body(2, model=name)))[0] for name in (*names, None)]
        status, answer, _ = await ask(session, COMPLETIONS, batch(1, 1, model="other"))
    assert [card["id"] for card in cards] == list(names)
    assert taken == [200, 200, 200]
    assert status == 404
    assert answer["error"]["message"] == (
        "The model `other` does not exist. Valid aliases: policy, org/Model-7B."
    )


async def test_a_star_takes_any_name_and_lists_those_beside_it() -> None:
    async with (
        StandInReplica() as replica,
        gateway_with(entry(replica, "own-0"), model_names=("policy", "*")) as gw,
        aiohttp.ClientSession(base_url(gw)) as session,
    ):
        cards = (await (await session.get("/v1/models")).json())["data"]
        status, answer, _ = await ask(session, COMPLETIONS, batch(1, 1, model="any/thing"))
    assert ([card["id"] for card in cards], status, answer["model"]) == (["policy"], 200, "policy")


def test_the_command_line_takes_several_names() -> None:
    here = ["--port", "0", "--replica", "http://127.0.0.1:1"]
    assert parse_settings(here).model_names == ("rose-policy",)
    more = ["--model-name", "a", "--model-name", "*"]
    assert parse_settings([*here, *more]).model_names == ("a", "*")
    with pytest.raises(ConfigError, match="a is given twice"):
        parse_settings([*here, "--model-name", "a", "--model-name", "a"])
    with pytest.raises(ConfigError, match="--model-name is empty"):
        parse_settings([*here, "--model-name", ""])


def test_a_batch_of_512_fits_into_what_may_wait_by_default() -> None:
    assert GatewaySettings.__dataclass_fields__["max_waiting"].default >= 4 * 512
    assert GatewaySettings.__dataclass_fields__["max_completions"].default >= 512
