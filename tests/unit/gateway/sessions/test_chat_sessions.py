"""Sessions of chats: what follows an answer is rendered alone, after the tokens that were kept."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from rose.client import BlockingRolloutClient, GatewayUnavailable, RolloutClient
from rose.errors import ConfigError
from rose.gateway.sessions import FORKED, NOT_KEPT, KeptSessions, KeptTurn
from rose.gateway.settings import parse_settings
from rose.security.callers import ANYBODY, Caller
from rose.tokenizer_pool.conversation import TemplateError, digest_after
from rose.tokenizer_pool.worker import Chat, Done, Follows, Setup, TextService, unpacked
from tests.fakes.tool_parser import TOOLS, WROTE
from tests.harness.tokenizer_kinds import byte_level, ids_of
from tests.unit.gateway.gateway_cases import base_url, failing_over
from tests.unit.gateway.sessions.session_cases import (
    EOS,
    SESSION,
    prompt_text,
    trajectories,
    writes,
)
from tests.unit.gateway.wire_cases import CHAT, ask, payloads, stream

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "go"}


async def said(session: Any, messages: list[Any], **fields: Any) -> Any:
    """The choice of a chat in the session."""
    body = {"messages": messages, "max_tokens": 200, **fields}
    status, answer, _ = await ask(session, CHAT, body, headers=SESSION)
    assert status == 200, answer
    return answer["choices"][0]


async def test_a_session_is_one_sequence_of_tokens(served: Any) -> None:
    replica, _, session = served
    first = writes(replica, "<think>hm</think> yes")
    choice = await said(session, [USER])
    assert choice["trajectory"] == {"index": 0, "turn": 0, "kept_tokens": 0}
    # An SDK sends an answer back with null fields, and its text as a part with a mark for caches.
    text = {"type": "text", "text": choice["message"]["content"], "cache_control": {}}
    history = [USER, {**choice["message"], "content": [text]}, {"role": "user", "content": "on"}]
    second = writes(replica, "more", ends=False)
    choice = await said(session, history, max_tokens=second)
    # Rendered anew, the template would leave out the thought.
    again = "<user>go\n<assistant><think>hm</think> yes<eos>\n<user>on\n<assistant>"
    assert prompt_text(replica) == again
    kept = len(ids_of("<user>go\n<assistant>")) + first
    assert choice["trajectory"] == {"index": 0, "turn": 1, "kept_tokens": kept}
    history += [choice["message"], USER]
    writes(replica, "end")
    await said(session, history)
    # An output that was cut off is closed by the template.
    assert prompt_text(replica) == again + "more<eos>\n<user>go\n<assistant>"
    (found,) = await trajectories(session)
    asked = replica.requests[-1]["token_ids"]
    assert found["token_ids"] == [*asked, *ids_of("end"), EOS]
    sampled = [k for turn in found["turns"] for k in range(turn["start"], turn["end"])]
    assert [k for k, one in enumerate(found["loss_mask"]) if one] == sampled
    assert len(sampled) == first + second + 4
    pairs = zip(found["token_ids"], found["loss_mask"], strict=True)
    logprobs = [-token / 1000 if one else 0.0 for token, one in pairs]
    assert found["logprobs"] == logprobs
    spans = [{"version": 3, "start": t["start"], "end": t["end"]} for t in found["turns"]]
    assert found["versions"] == spans
    assert [turn["finish_reason"] for turn in found["turns"]] == ["stop", "length", "stop"]
    assert found["shared_tokens"] == 0


async def test_calls_and_their_results_go_on_from_the_sampled_tokens(served: Any) -> None:
    replica, _, session = served
    writes(replica, WROTE)
    _, events = await stream(
        session, CHAT, {"messages": [USER], "max_tokens": 200, "tools": TOOLS}, headers=SESSION
    )
    last = payloads(events)[-1]["choices"][0]
    assert last["trajectory"] == {"index": 0, "turn": 0, "kept_tokens": 0}
    calls = [{k: v for k, v in c.items() if k != "index"} for c in last["delta"]["tool_calls"]]
    # The caller writes the arguments in its own way, and gives the call an id of its own.
    calls[0] |= {"id": "mine"}
    calls[0]["function"]["arguments"] = '{ "x":1 }'
    answered = {"role": "assistant", "content": last["delta"]["content"], "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "mine", "content": "49"}
    writes(replica, "done")
    choice = await said(session, [USER, answered, result], tools=TOOLS)
    assert choice["trajectory"]["turn"] == 1
    assert prompt_text(replica) == f"[f]<user>go\n<assistant>{WROTE}<eos>\n<tool>49\n<assistant>"


async def test_an_edited_history_begins_another_trajectory(served: Any) -> None:
    replica, _, session = served
    writes(replica, "one")
    one = (await said(session, [USER]))["message"]
    writes(replica, "two")
    await said(session, [USER, one, USER])
    edited = [USER, {**one, "content": "none"}, USER]
    assert (await said(session, edited))["trajectory"] == {
        "index": 1, "turn": 0, "kept_tokens": 0, "why": NOT_KEPT,
    }  # fmt: skip
    assert (await said(session, [USER, one, USER], tools=TOOLS, tool_choice="none"))["trajectory"][
        "why"
    ] == NOT_KEPT
    other = [USER, one, {"role": "user", "content": "other"}]
    forked = (await said(session, other))["trajectory"]
    assert (forked["index"], forked["turn"], forked["why"]) == (3, 1, FORKED)
    found = await trajectories(session)
    assert [len(each["turns"]) for each in found] == [2, 1, 1, 2]
    assert [each["shared_tokens"] for each in found] == [0, 0, 0, forked["kept_tokens"]]
    assert (
        found[0]["token_ids"][: forked["kept_tokens"]]
        == found[3]["token_ids"][: forked["kept_tokens"]]
    )


async def test_the_same_turn_again_is_one_turn(served: Any) -> None:
    replica, _, session = served
    writes(replica, "one")
    one = await said(session, [USER], request_id="a")
    for _ in range(2):
        assert (await said(session, [USER], request_id="a")) == one
    both = [USER, one["message"], USER]
    again = await said(session, both, request_id="b")
    assert await said(session, both, request_id="b") == again
    assert [len(each["turns"]) for each in await trajectories(session)] == [2]
    samples = {"messages": [USER], "max_tokens": 20, "n": 2}
    _, answer, _ = await ask(session, CHAT, samples, headers=SESSION)
    assert [choice["trajectory"]["index"] for choice in answer["choices"]] == [1, 2]


async def test_a_turn_that_was_moved_is_kept_whole(tokenizer: Path) -> None:
    limits = {"tokenizer": tokenizer, "max_model_len": 400, "text_timeout_s": 30.0}
    async with failing_over(**limits) as (guest, dedicated, _, session):
        guest.script, guest.revoke_after, guest.version = ids_of("abcd"), 2, 0
        dedicated.script = ids_of("cd")
        choice = await said(session, [USER], max_tokens=4)
        (found,) = await trajectories(session)
    assert choice["message"]["content"] == "abcd"
    assert found["token_ids"] == [*ids_of("<user>go\n<assistant>"), *ids_of("abcd")]
    assert sum(found["loss_mask"]) == 4


async def test_turns_that_end_without_an_answer_and_turns_of_no_session_are_not_kept(
    served: Any,
) -> None:
    replica, gw, session = served
    writes(replica, "one")
    _, answer, _ = await ask(session, CHAT, {"messages": [USER], "max_tokens": 9})
    assert "trajectory" not in answer["choices"][0]
    answered = {"role": "assistant", "content": "o"}
    choice = await said(
        session, [USER, answered], continue_final_message=True, add_generation_prompt=False
    )
    assert "trajectory" not in choice
    assert gw._server._sessions.size_bytes == 0
    status, answer, _ = await ask(session, CHAT, {"messages": [1]}, headers=SESSION)
    assert status == 400
    assert "every message is an object" in answer["error"]["message"]
    async with session.get("/rose/v1/sessions/s") as response:
        assert response.status == 404
        assert "no turn of the session 's' is kept" in await response.text()


async def test_the_client_reads_a_session_from_the_gateways_that_keep_it(served: Any) -> None:
    replica, gw, session = served
    writes(replica, "one")
    await said(session, [USER])
    (found,) = await trajectories(session)
    async with RolloutClient([base_url(gw), "http://127.0.0.1:1"]) as client:
        (one,) = await client.trajectories("s")
        assert await client.trajectories("a b/ö") == ()
    assert (list(one.token_ids), list(one.loss_mask)) == (found["token_ids"], found["loss_mask"])
    assert (one.versions[0].version, one.turns[0].finish_reason) == (3, "stop")
    with BlockingRolloutClient(base_url(gw)) as blocking:
        assert await asyncio.to_thread(blocking.trajectories, "s") == (one,)
        await asyncio.to_thread(blocking.close)
    async with RolloutClient("http://127.0.0.1:1") as client:
        with pytest.raises(GatewayUnavailable, match="no gateway says what it keeps"):
            await client.trajectories("s")


def turn(name: str, tokens: int = 1_000) -> KeptTurn:
    ids, logprobs = array("q", [1] * tokens), array("d", [0.0] * tokens)
    digest = name.encode()
    return KeptTurn(name, ids, ids, logprobs, [], "stop", b"", digest, digest, b"{}")


async def test_memory_and_age_are_bounded() -> None:
    now = [0.0]
    one = turn("x").size_bytes
    kept = KeptSessions(3 * one, 10.0, lambda: now[0], lambda caller, job: job)

    def left() -> list[str]:
        return [key.partition("\n")[2] for key in kept._sessions]

    for name in "abc":
        kept.keep(f"\n{name}", turn(name), None)
    kept.begin(ANYBODY, "", "a", b"")
    kept.keep("\nd", turn("d"), None)
    assert left() == ["c", "a", "d"], "the one that was not used for longest is forgotten"
    assert kept.size_bytes == 3 * one
    now[0] = 5.0
    assert kept.trajectories(ANYBODY, "", "a")
    now[0] = 11.0
    kept.trim()
    assert left() == ["a"]
    assert kept.trajectories(Caller("j", "me"), "", "a") == [], "another caller's"
    long = kept.begin(ANYBODY, "", "a", b"")
    kept.forget(ANYBODY, "", "a")
    assert kept.size_bytes == 0
    place = kept.keep("\na", turn("y"), next(iter(long._session.ends.values())))
    assert [each.name for each in place.trajectory.turns] == ["a", "y"]
    assert kept.size_bytes == 2 * one + 8
    kept.keep("\nb", turn("z", 10_000), None)
    assert (left(), kept.size_bytes) == ([], 0), "larger than all memory"
    with pytest.raises(ConfigError, match="session-idle-s"):
        parse_settings(["--port=0", "--replica=http://127.0.0.1:1", "--session-idle-s=0"])


def service(template: str) -> TextService:
    return TextService(Setup(byte_level().to_str(), template, template, {}, 10_000, 0, 0.0))


async def test_a_template_that_ties_messages_together_is_rendered_whole() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "a"}
    called = {**said, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}

    def follows(template: str, messages: list[Any], answer: Any = said) -> Done:
        known = digest_after(digest_after(b"", USER), answer)
        job = Chat(
            json.dumps([USER, answer, *messages]).encode(), {}, follows=Follows(b"", [known])
        )
        done = service(template).answer(job)
        assert isinstance(done, Done)
        return done

    loop = "{% for m in messages %}"
    plain = loop + "<{{ m.role }}>{{ m.content }}{% endfor %}"
    found = follows(plain, [USER])
    assert unpacked(found.token_ids[0]) == ids_of("<user>go")
    assert found.kept
    for template, new, answer in (
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [USER], said),
        (
            loop + "{{ m.content }}{{ loop.length if m.tool_calls }};{% endfor %}",
            [USER],
            called,
        ),
        (loop + "{{ raise_exception('') if m.content == '.' }}{% endfor %}", [USER], said),
        (plain, [{"role": "developer", "content": "x"}], said),
    ):
        assert follows(template, new, answer).kept is None
    found = follows(
        loop + "{{ m.content }}{% if m.tool_calls %}!{% endif %};{% endfor %}", [USER], called
    )
    assert unpacked(found.token_ids[0]) == ids_of(";go;")
    # A message with calls is closed by something else, or after the results of its calls.
    ends = "{{ m.content }}{{ '!' if m.tool_calls else ';' }}{% endfor %}"
    assert unpacked(follows(loop + ends, [USER], called).token_ids[0]) == ids_of("go;")
    results = "{% if not loop.last and loop.nextitem.role == 'tool' %}{% else %};{% endif %}"
    tool = {"role": "tool", "content": "49"}
    template = loop + "{{ m.content }}" + results + "{% endfor %}"
    for content in ("a", ""):
        found = follows(template, [tool], {**called, "content": content})
        assert unpacked(found.token_ids[0]) == ids_of("49;")
    with pytest.raises(TemplateError):
        digest_after(b"", {"role": 1})
