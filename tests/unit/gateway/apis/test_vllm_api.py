"""`/inference/v1/generate`: the shapes are checked against vLLM's own classes in its engine test;
here they are pinned key by key, in vLLM's order."""

import json
from typing import Any

import pytest

from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import failing_over, serving
from tests.unit.gateway.wire_cases import VLLM, ask, payloads, stream, vllm_body

CHOICE_KEYS = """
    index finish_reason stop_reason token_ids routed_experts sampling_mask weight_versions logprobs
"""
WHOLE_KEYS = """
    request_id model created usage prompt_logprobs prompt_token_id_logprobs prompt_token_ids
    mm_placeholders metrics kv_transfer_params ec_transfer_params output_mode choices versions
    segments attempts
"""


def logprobs(*tokens: int) -> dict[str, Any]:
    """Return a whole answer's logprobs, with the name that tokens had before vLLM 0.32 too."""

    def one(token: int) -> dict[str, Any]:
        return {"token_id": token, "logprob": -token / 1000, "rank": None}

    def named(token: int) -> dict[str, Any]:
        return {**one(token), "top_logprobs": [one(token)], "token": f"token_id:{token}"}

    return {"content": [named(token) for token in tokens]}


async def test_a_whole_answer_has_vllms_keys_and_ours_after_them() -> None:
    async with serving(StandInReplica(version=4)) as (_, _, session):
        status, answer, _ = await ask(session, VLLM, vllm_body(request_id="r"))
    assert status == 200
    assert list(answer) == WHOLE_KEYS.split()
    assert list(answer["choices"][0]) == CHOICE_KEYS.split()
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert answer["choices"][0] == {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [101, 102, 103],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "4", "start": 0, "end": 3}],
        "logprobs": logprobs(101, 102, 103),
    }
    assert answer["versions"] == [{"version": 4, "start": 0, "end": 3}]
    assert answer["segments"] == [{"replica": "guest-0", "kind": "guest", "start": 0, "end": 3}]
    assert (answer["request_id"], answer["attempts"]) == ("r", 1)


async def test_logprobs_come_only_when_asked_for_and_a_stop_token_is_named() -> None:
    async with serving() as (replica, _, session):
        replica.stop_after = 2
        body = vllm_body(9, sampling={"logprobs": None, "stop_token_ids": [102]})
        _, answer, _ = await ask(session, VLLM, body)
    choice = answer["choices"][0]
    assert choice["logprobs"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 102)


async def test_stream_events_are_vllms_byte_for_byte_but_for_our_last_fields() -> None:
    async with serving(StandInReplica(version=4, delay_s=0.01)) as (_, _, session):
        body = vllm_body(2, request_id="r", stream_options={"include_usage": True})
        status, events = await stream(session, VLLM, body)
    first = (
        '{"request_id":"r","usage":null,"output_mode":"tokens","choices":[{"index":0,'
        '"finish_reason":null,"stop_reason":null,"token_ids":[101],"routed_experts":null,'
        '"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":101,'
        '"logprob":-0.101,"rank":null,"top_logprobs":[{"token_id":101,"logprob":-0.101,'
        '"rank":null}]}]}}]'
    )
    usage = '"usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2}'
    assert status == 200
    assert events[0] == f'data: {first},"versions":[{{"version":4,"start":0,"end":1}}]}}'
    assert events[-2] == f'data: {{"request_id":"r",{usage},"output_mode":"tokens","choices":[]}}'
    assert events[-1] == "data: [DONE]"
    last = payloads(events)[-2]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["weight_versions"] == [{"version": "4", "start": 0, "end": 2}]
    assert (last["segments"][0]["end"], last["attempts"]) == (2, 1)


async def test_streamed_tokens_and_versions_cover_the_turn_across_a_revocation() -> None:
    async with failing_over(StandInReplica(1), StandInReplica(2)) as (guest, _, _, session):
        guest.revoke_after = 4
        _, events = await stream(session, VLLM, vllm_body(10))
    chunks = payloads(events)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    versions = [
        span["version"]
        for chunk in chunks
        for span in chunk["versions"]
        for _ in range(span["start"], span["end"])
    ]
    assert tokens == list(range(101, 111))
    assert versions == [1] * 4 + [2] * 6
    assert chunks[-1]["attempts"] == 2


async def test_several_samples_are_several_choices_with_seeds_of_their_own() -> None:
    async with serving() as (replica, _, session):
        body = vllm_body(3, sampling={"n": 3, "seed": 7})
        _, whole, _ = await ask(session, VLLM, body)
        _, events = await stream(session, VLLM, body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9
    assert sorted(asked["sampling"]["seed"] for asked in replica.requests[:3]) == [7, 8, 9]
    ends = [
        choice["index"]
        for chunk in payloads(events)
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        (vllm_body(3, model="other"), 404, "NotFoundError", "Valid aliases: rose-policy"),
        ({"token_ids": [1] * 40, "sampling_params": {}}, 400, "BadRequestError", "context length"),
        (vllm_body(3, sampling={"stop": ["x"]}), 400, "BadRequestError", "stop"),
        (vllm_body(3, exact_version=9), 409, "ConflictError", "version 9"),
    ],
)
async def test_errors_have_vllms_statuses_and_body(
    body: Any, status: int, kind: str, said: str
) -> None:
    async with serving(max_model_len=32, version_wait_s=0.02) as (_, _, session):
        got, answer, _ = await ask(session, VLLM, body)
        again, _ = await stream(session, VLLM, body)
    error = answer["error"]
    assert (got, again) == (status, status)
    assert (list(error), error["type"], error["code"]) == (
        ["message", "type", "param", "code"],
        kind,
        status,
    )
    assert said in error["message"]


async def test_without_max_tokens_a_turn_may_fill_the_models_length() -> None:
    async with serving(max_model_len=32) as (_, _, session):
        body = {"token_ids": [1, 2], "sampling_params": {}}
        _, answer, _ = await ask(session, VLLM, body)
    assert len(answer["choices"][0]["token_ids"]) == 30


async def test_an_error_after_the_first_token_is_an_event_and_an_end() -> None:
    async with serving(max_attempts=1) as (replica, _, session):
        replica.break_after = 2
        status, events = await stream(session, VLLM, vllm_body(5))
    assert status == 200
    error = json.loads(events[-2][6:])["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert events[-1] == "data: [DONE]"
