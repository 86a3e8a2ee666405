"""Chats with tools: the template is given them, and calls are found in what the policy wrote."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rose.errors import ConfigError
from rose.gateway import Gateway
from rose.gateway.settings import parse_settings
from rose.tokenizer_pool.pool import TextRefused
from rose.tokenizer_pool.tool_worker import ToolService
from rose.tokenizer_pool.worker import Done, ParseTools, ToolSetup, packed
from tests.fakes.replica import StandInReplica
from tests.fakes.tool_parser import PARSER, TOOLS, WROTE, in_process
from tests.harness.tokenizer_kinds import ids_of, save_byte_tokenizer, text_of
from tests.unit.gateway.gateway_cases import serving
from tests.unit.gateway.wire_cases import CHAT, ask, payloads, stream

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}={{ c.function.arguments.x }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: Path) -> AsyncIterator[tuple[StandInReplica, Gateway, Any]]:
    limits = {"tokenizer": tokenizer, "max_model_len": 400, "text_timeout_s": 30.0}
    async with serving(StandInReplica(version=3), "own-0", **limits) as (replica, gw, session):
        assert gw._codec is not None
        gw._codec._tool_pool = in_process(tokenizer)
        yield replica, gw, session


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "go"}]
    return {"messages": messages, "tools": TOOLS, "return_token_ids": True, **fields}


async def test_calls_are_found_and_token_ids_kept(served: Any) -> None:
    replica, _, session = served
    replica.script = ids_of(WROTE)
    body = chat(max_tokens=len(WROTE), request_id="turn")
    status, answer, _ = await ask(session, CHAT, body)
    _, again, _ = await ask(session, CHAT, body)
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (status, choice["finish_reason"]) == (200, "tool_calls")
    assert choice["message"]["content"] == "ok "
    assert (call["type"], call["function"]["name"]) == ("function", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": 1}
    assert choice["token_ids"] == ids_of(WROTE)
    assert choice["versions"] == [{"version": 3, "start": 0, "end": len(WROTE)}]
    assert text_of(answer["prompt_token_ids"]) == "[f]<user>go<assistant>"
    assert again == answer, "the same turn has the same calls, by the same ids"


async def test_a_stream_says_its_calls_at_its_end(served: Any) -> None:
    replica, _, session = served
    replica.script = ids_of(WROTE)
    _, events = await stream(session, CHAT, chat(max_tokens=len(WROTE)))
    chunks = payloads(events)
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["content"] == "ok "
    assert [(c["index"], c["function"]["name"]) for c in last["delta"]["tool_calls"]] == [(0, "f")]
    tokens = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or ()]
    assert tokens == ids_of(WROTE)


async def test_an_output_without_a_call_is_text(served: Any) -> None:
    replica, _, session = served
    for wrote in ("no call", '<call>{"name": "other", "arguments": {}}</call>'):
        replica.script = ids_of(wrote)
        _, answer, _ = await ask(session, CHAT, chat(max_tokens=len(wrote)))
        choice = answer["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == wrote, "of a tool that was not offered"
    replica.script = ids_of(WROTE)
    _, none, _ = await ask(session, CHAT, chat(max_tokens=len(WROTE), tool_choice="none"))
    assert none["choices"][0]["message"]["content"] == WROTE, "nothing is to be called"


async def test_what_a_parser_refuses_is_400_and_says_why(served: Any) -> None:
    replica, _, session = served
    replica.script = ids_of("<choke>")
    status, answer, _ = await ask(session, CHAT, chat(max_tokens=7))
    assert status == 400
    assert answer["error"]["message"] == "tool calls cannot be found: this is not to be parsed"


async def test_calls_and_results_of_earlier_turns_reach_the_template(served: Any) -> None:
    session = served[2]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "49"},
        {"role": "assistant", "content": "fine", "tool_calls": []},
    ]
    body = {"messages": messages, "tools": TOOLS}
    _, answer, _ = await ask(session, "/tokenize", body)
    text = {"type": "text", "text": "hi"}
    joined = {"messages": [{"role": "user", "content": [text, text]}]}
    _, other, _ = await ask(session, "/tokenize", joined)
    assert text_of(other["tokens"]) == "<user>hiĊhi<assistant>"
    for content in (None, 7, [{"type": "image_url", "image_url": {"url": "x"}}]):
        bad = [{"role": "user", "content": content}]
        assert (await ask(session, CHAT, chat(messages=bad)))[0] == 400
    emptied = []
    for arguments in ("{", "[]", "42", '"s"', "", None, [], 42):
        broken = {**call, "function": {"name": "f", "arguments": arguments}}
        bad = [messages[0], {"role": "assistant", "tool_calls": [broken]}]
        _, other, _ = await ask(session, "/tokenize", {"messages": bad, "tools": TOOLS})
        emptied.append(text_of(other["tokens"]))
    rendered = "[f]<user>go<assistant>!f=7<tool>49<assistant>fine<assistant>"
    assert text_of(answer["tokens"]) == rendered
    assert set(emptied) == {"[f]<user>go<assistant>!f=<assistant>"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": []}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools"),
        ({"tools": TOOLS * 257}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    served: Any, fields: Any, named: str
) -> None:
    session = served[2]
    status, answer, _ = await ask(session, CHAT, chat(**fields))
    assert status == 400
    assert named in answer["error"]["message"]


async def test_without_a_parser_tools_are_refused_unless_none_is_to_be_called(served: Any) -> None:
    replica, gw, session = served
    replica.script = []
    kept, gw._codec._tool_pool = gw._codec._tool_pool, None
    try:
        status, answer, _ = await ask(session, CHAT, chat(max_tokens=2))
        none, _, _ = await ask(session, CHAT, chat(max_tokens=2, tool_choice="none"))
    finally:
        gw._codec._tool_pool = kept
    assert (status, none) == (400, 200)
    assert "--tool-call-parser" in answer["error"]["message"]


async def test_the_token_that_ended_an_output_and_a_stop_string_are_no_text_of_it(
    tokenizer: Path,
) -> None:
    service = ToolService(ToolSetup(PARSER, str(tokenizer), 0, 0.0))
    tools = json.dumps(TOOLS).encode()
    for include, text in ((False, "a "), (True, "a END")):
        found = service.answer(ParseTools(packed(ids_of("a END")), tools, "END", include))
        assert isinstance(found, Done)
        assert found.text == text


async def test_a_parser_that_is_none_is_said_once_it_is_asked(tokenizer: Path) -> None:
    from rose.tokenizer_pool.pool import TextPool

    said: list[Any] = []
    setup = ToolSetup("tests.fakes.tool_parser:Nothing", str(tokenizer), 1 << 30, 30.0)
    module = "rose.tokenizer_pool.tool_worker"
    pool = TextPool(setup, lambda *a, **k: said.append(k), workers=1, module=module)
    try:
        with pytest.raises(TextRefused, match="no attribute 'Nothing'"):
            await pool.run(ParseTools(b"", b"[]"))
    finally:
        await pool.close()
    assert "Nothing" in said[0]["reason"]


async def test_the_command_line_wants_a_tokenizer_with_a_parser() -> None:
    here = ["--port", "0", "--replica", "http://127.0.0.1:1", "--tool-call-parser", PARSER]
    with pytest.raises(ConfigError, match="needs --tokenizer"):
        parse_settings(here)
    assert parse_settings([*here, "--tokenizer", "."]).tool_call_parser == PARSER
