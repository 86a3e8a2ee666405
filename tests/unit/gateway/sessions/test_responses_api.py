"""OpenAI's Responses API, as its own client speaks it, over the chats of a gateway."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.tool_parser import WROTE
from tests.unit.gateway.gateway_cases import base_url
from tests.unit.gateway.sessions.session_cases import (
    SESSION,
    prompt_text,
    trajectories,
    writes,
)
from tests.unit.gateway.wire_cases import ask, stream

openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
USER = {"role": "user", "content": [{"type": "input_text", "text": "go"}]}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "rose-policy", "input": "go", **fields}


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Any) -> AsyncIterator[Any]:
    url = f"{base_url(served[1])}/v1"
    headers = {"default_headers": SESSION, "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=url, api_key="-", **headers) as client:
        yield client


async def test_a_coding_agent_is_one_trajectory(served: Any, client: Any) -> None:
    replica, _, session = served
    asked = {"instructions": "be", "tools": [TOOL], "store": False, "parallel_tool_calls": True}
    writes(replica, WROTE)
    async with client.responses.stream(**body(**asked, input=[USER])) as events:
        kinds = [event.type async for event in events]
        first = await events.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.output_item.done") == 2
    text, call = first.output
    assert (text.content[0].text, call.name, call.arguments) == ("ok ", "f", '{"x": 1}')
    items = [item.model_dump(exclude_unset=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "49"}
    writes(replica, "done")
    second = await client.responses.create(**body(**asked, input=[USER, *items, result]))
    assert (second.output_text, second.status) == ("done", "completed")
    assert (second.trajectory["turn"], second.usage.output_tokens) == (1, 5)
    opening = f"[f]<system>be\n<user>go\n<assistant>{WROTE}<eos>\n"
    assert prompt_text(replica) == f"{opening}<tool>49\n<assistant>"
    # The same by the id of the answer alone: the instructions are not rendered again.
    third = await client.responses.create(
        **body(**asked, input=[result], previous_response_id=first.id)
    )
    assert prompt_text(replica) == f"{opening}<tool>49\n<assistant>"
    assert (third.trajectory["index"], third.previous_response_id) == (1, first.id)
    await client.responses.create(**body(**asked, previous_response_id=third.id))
    last = f"{opening}<tool>49\n<assistant>done<eos>\n<user>go\n<assistant>"
    assert prompt_text(replica) == last
    found = await trajectories(session)
    assert [len(each["turns"]) for each in found] == [2, 3]
    for changed in ({"instructions": "other"}, {"tools": []}):
        again = {**body(**asked, previous_response_id=first.id), **changed}
        with pytest.raises(openai.BadRequestError, match="send the same, or the whole input"):
            await client.responses.create(**again)
    with pytest.raises(openai.BadRequestError, match="keeps no answer 'resp_x'"):
        await client.responses.create(**body(previous_response_id="resp_x"))


async def test_text_is_streamed_as_it_comes(served: Any, client: Any) -> None:
    replica, _, session = served
    writes(replica, "abcd")
    replica.delay_s = 0.01
    async with client.responses.stream(**body()) as events:
        deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
        response = await events.get_final_response()
    assert "".join(deltas) == response.output_text == "abcd"
    replica.delay_s = 0.0
    assert len(deltas) > 1
    assert response.usage.total_tokens == len("<user>go\n<assistant>abcd") + 1
    writes(replica, "abcd", ends=False)
    cut = await client.responses.create(**body(max_output_tokens=2))
    assert (cut.status, cut.output_text) == ("incomplete", "ab")
    assert cut.incomplete_details.reason == "max_output_tokens"
    _, lines = await stream(session, RESPONSES, body(max_output_tokens=2), headers=SESSION)
    events = [json.loads(line.partition("data: ")[2]) for line in lines]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [line.split("\n")[0] for line in lines] == [f"event: {e['type']}" for e in events]
    last = events[-1]["response"]
    assert last["versions"] == [{"version": 3, "start": 0, "end": 2}]
    assert last["trajectory"]["index"] == 2
    formats = {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}
    await client.responses.create(**body(max_output_tokens=2, **formats))
    assert replica.requests[-1]["sampling"]["structured_outputs"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"n": 2}, "n is not of this API"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "X-Session-ID"),
        ({"input": []}, "at least one message"),
        ({"input": None}, "at least one message"),
        ({"input": [1]}, "each of responses is an object"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "'reasoning'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image_url"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    served: Any, fields: Any, named: str
) -> None:
    status, answer, _ = await ask(served[2], RESPONSES, body(**fields))
    assert status == 400
    assert named in answer["error"]["message"]


async def test_a_turn_that_breaks_ends_its_stream_with_an_error(served: Any) -> None:
    replica, _, session = served
    writes(replica, "abc")
    replica.break_after = 1
    try:
        _, events = await stream(session, RESPONSES, body(timeout_s=0.4))
    finally:
        replica.break_after = None
    error = json.loads(events[-1].partition("data: ")[2])
    assert (error["type"], events[-1].split("\n")[0]) == ("error", "event: error")
    assert error["message"]
