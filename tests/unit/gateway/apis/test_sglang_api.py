import json
from typing import Any

from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import serving
from tests.unit.gateway.wire_cases import ask, payloads, stream

GENERATE = "/generate"
META_KEYS = """
    id finish_reason prompt_tokens weight_version num_retractions input_token_logprobs
    output_token_logprobs output_token_logprobs_length reasoning_tokens completion_tokens
    cached_tokens weight_versions e2e_latency
"""


def sglang_body(max_new_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, **fields.pop("sampling", {})}
    body = {"input_ids": [1, 100], "sampling_params": sampling, "return_logprob": True}
    return {**body, **fields}


async def test_a_whole_answer_has_sglangs_shape() -> None:
    async with serving(StandInReplica(version=4)) as (replica, _, session):
        body = sglang_body(rid="r", sampling={"temperature": 0, "top_k": -1})
        status, answer, _ = await ask(session, GENERATE, body)
    meta = answer["meta_info"]
    assert status == 200
    assert answer["output_ids"] == [101, 102, 103]
    assert list(meta) == META_KEYS.split()
    assert meta["output_token_logprobs"] == [[-t / 1000, t, None] for t in (101, 102, 103)]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 2, 3)
    assert meta["weight_version"] == "4"
    assert answer["versions"] == [{"version": 4, "start": 0, "end": 3}]
    asked = replica.requests[0]["sampling"]
    assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.0, 0, 3)


async def test_stream_events_repeat_the_output_so_far() -> None:
    async with serving(StandInReplica(delay_s=0.01)) as (_, _, session):
        _, events = await stream(session, GENERATE, sglang_body(3))
    outputs = payloads(events)
    assert [output["output_ids"] for output in outputs[:2]] == [[101], [101, 102]]
    assert outputs[0]["meta_info"]["finish_reason"] is None
    assert outputs[-1]["output_ids"] == [101, 102, 103]
    assert len(outputs[-1]["meta_info"]["output_token_logprobs"]) == 3
    assert outputs[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_a_list_of_prompts_is_answered_by_a_list() -> None:
    async with serving() as (_, _, session):
        body = sglang_body(2, input_ids=[[1, 10], [1, 20]])
        _, answers, _ = await ask(session, GENERATE, body)
        refused, _ = await stream(session, GENERATE, body)
    assert [answer["output_ids"] for answer in answers] == [[11, 12], [21, 22]]
    assert refused == 400


async def test_sglangs_higher_priority_is_the_lower_number_inside() -> None:
    async with serving() as (replica, _, session):
        await ask(session, GENERATE, sglang_body(2, priority=5))
    assert replica.requests[0]["priority"] == -5


async def test_of_text_and_tokens_the_tokens_are_the_prompt_as_in_sglang() -> None:
    async with serving(name="r") as (_, _, session):
        status, answer, _ = await ask(session, GENERATE, sglang_body(2, text="both"))
    assert (status, answer["meta_info"]["prompt_tokens"]) == (200, 2)


async def test_an_error_after_the_first_token_is_an_event_and_an_end() -> None:
    async with serving(max_attempts=1) as (replica, _, session):
        replica.break_after = 2
        _, events = await stream(session, GENERATE, sglang_body(5))
    error = json.loads(events[-2][6:])["error"]
    assert (error["code"], error["retryable"]) == (503, True)
