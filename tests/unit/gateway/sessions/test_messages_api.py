"""Anthropic's Messages API, as its own client speaks it, over the chats of a gateway."""

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

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = "/v1/messages"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "go"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "rose-policy", "max_tokens": 200, "messages": [USER], **fields}


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Any) -> AsyncIterator[Any]:
    url = base_url(served[1])
    headers = {"default_headers": SESSION, "max_retries": 0}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", **headers) as client:
        yield client


async def test_a_coding_agent_is_one_trajectory(served: Any, client: Any) -> None:
    """The turns of an agent, streamed and whole; it moves its cache mark from turn to turn."""
    replica, _, session = served
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    asked = {"system": system, "tools": [TOOL]}
    user: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "go", **mark}]}
    writes(replica, WROTE)
    async with client.messages.stream(**body(**asked, messages=[user])) as events:
        kinds = [event.type async for event in events]
        first = await events.get_final_message()
    assert kinds.count("content_block_start") == 2
    assert kinds[0], kinds[-1] == ("message_start", "message_stop")
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == (
        "ok ",
        "f",
        {"x": 1},
        "tool_use",
    )
    assert first.usage.output_tokens == len(WROTE) + 1
    del user["content"][0]["cache_control"]
    blocks = [block.model_dump() for block in first.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "49", **mark}
    more = [result, {"type": "text", "text": "on"}]
    history = [user, {"role": "assistant", "content": blocks}, {"role": "user", "content": more}]
    writes(replica, "done")
    second = await client.messages.create(**body(**asked, messages=history))
    assert second.content[0].text == "done"
    assert (second.stop_reason, second.trajectory["turn"]) == ("end_turn", 1)
    assert second.versions == [{"version": 3, "start": 0, "end": 5}]
    opening = f"[f]<system>be\n<user>go\n<assistant>{WROTE}<eos>\n"
    assert prompt_text(replica) == f"{opening}<tool>49\n<user>on\n<assistant>"
    assert second.usage.input_tokens == len(replica.requests[-1]["token_ids"])
    (found,) = await trajectories(session)
    assert found["token_ids"][: second.usage.input_tokens] == replica.requests[-1]["token_ids"]
    assert [turn["id"] for turn in found["turns"]] == [first.id, second.id]
    count = await client.messages.count_tokens(
        model="rose-policy", messages=[USER], system=system, tools=[TOOL]
    )
    assert count.input_tokens == len("[f]<system>be\n<user>go\n<assistant>")


async def test_text_is_streamed_as_it_comes_and_stops_are_named(served: Any, client: Any) -> None:
    replica, _, session = served
    size = writes(replica, "abcEND", ends=False)
    replica.delay_s = 0.01
    async with client.messages.stream(**body(stop_sequences=["END"], max_tokens=size)) as events:
        texts = [event.text async for event in events if event.type == "text"]
        message = await events.get_final_message()
    replica.delay_s = 0.0
    assert "".join(texts) == message.content[0].text == "abc"
    assert len(texts) > 1
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    whole = await client.messages.create(**body(max_tokens=2))
    assert (whole.content[0].text, whole.stop_reason) == ("ab", "max_tokens")
    _, events = await stream(session, MESSAGES, body(max_tokens=2), headers=SESSION)
    kinds = [event.split("\n")[0] for event in events]
    assert kinds[:2] == ["event: message_start", "event: content_block_start"]
    assert kinds[-3:] == [
        "event: content_block_stop", "event: message_delta", "event: message_stop",
    ]  # fmt: skip
    last = json.loads(events[-2].partition("data: ")[2])
    assert last["trajectory"]["index"] == 2
    assert last["versions"] == [{"version": 3, "start": 0, "end": 2}]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    thinking["extra_body"] = {"context_management": edits}
    await client.messages.create(**body(max_tokens=2, **thinking))


async def test_words_put_into_its_mouth_are_continued_but_not_kept(served: Any) -> None:
    replica, _, session = served
    writes(replica, "d")
    said = {"role": "assistant", "content": [{"type": "text", "text": "abc"}]}
    _, answer, _ = await ask(session, MESSAGES, body(messages=[USER, said]), headers=SESSION)
    assert prompt_text(replica) == "<user>go\n<assistant>abc"
    assert "trajectory" not in answer
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    history = [
        USER,
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
    ]
    assert (await ask(session, MESSAGES, body(messages=history)))[0] == 200
    assert prompt_text(replica).endswith("<assistant><call>f</call><eos>\n<tool>\n<assistant>")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mcp_servers": [{}]}, "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
        ),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"n": 2}, "n is not of this API"),
        ({"logprobs": True}, "logprobs"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
        ),
        ({"tools": {}}, "validation error"),
        ({"stop_sequences": [""]}, "stop"),
        ({"messages": []}, "at least one message"),
        ({"messages": "x"}, "list"),
        ({"messages": [1]}, "each of messages is an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"output_config": {"format": {"type": "yaml"}}}, "response_format"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    served: Any, fields: Any, named: str
) -> None:
    status, answer, _ = await ask(served[2], MESSAGES, body(**fields))
    assert status == 400
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert named in answer["error"]["message"]


async def test_the_client_raises_its_own_errors(served: Any, client: Any) -> None:
    replica, _, session = served
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await client.messages.create(**body(model="other"))
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        await client.messages.create(**body(max_tokens=5_000))
    writes(replica, "<choke>")
    with pytest.raises(anthropic.BadRequestError, match="not to be parsed"):
        await client.messages.create(**body(tools=[TOOL]))
    writes(replica, "abc")
    replica.break_after, gone = 1, replica
    try:
        _, events = await stream(session, MESSAGES, body(timeout_s=0.4))
    finally:
        gone.break_after = None
    assert events[-1].startswith("event: error\ndata: {")
    error = json.loads(events[-1].partition("data: ")[2])["error"]
    assert error["type"] in ("timeout_error", "overloaded_error")
