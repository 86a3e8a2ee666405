"""Images in chats of all APIs: data URLs in, one trajectory with the processor's tokens out."""

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.replica import IMAGE_TOKENS, PLACE
from tests.harness.tokenizer_kinds import ids_of, save_byte_tokenizer
from tests.unit.gateway.sessions.session_cases import (
    EOS,
    SESSION,
    sessions_served,
    trajectories,
    writes,
)
from tests.unit.gateway.wire_cases import ask, payloads, stream

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CAT, DOG = b"\x89PNG\r\n\x1a\ncat", b"GIF89adog"
NAMES = [hashlib.sha256(each).hexdigest() for each in (CAT, DOG)]
# The letter of an image is the token PLACE of the byte tokenizer.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}g{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("seeing"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert ids_of("g") == [PLACE]
    return folder


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "auto"}}


def said(text: str) -> list[int]:
    """Tokens of a text, in which @ is an image."""
    found: list[int] = []
    for k, part in enumerate(text.split("@")):
        found += (IMAGE_TOKENS if k else []) + ids_of(part)
    return found


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": parts}


OPENING = user("see ", shown(CAT), " and ", shown(DOG))
SEEN = said("<user>see @ and @\n<assistant>")


async def test_a_chat_with_images_is_one_trajectory(tokenizer: Path) -> None:
    async with sessions_served(tokenizer) as (replica, _, session):
        writes(replica, "a cat")
        asked = {"messages": [OPENING], "return_token_ids": True}
        status, first, _ = await ask(session, CHAT, asked, headers=SESSION)
        assert status == 200, first
        assert first["prompt_token_ids"] == SEEN
        assert first["usage"]["prompt_tokens"] == len(SEEN)
        answer = {"role": "assistant", "content": "a cat"}
        by_name = {"type": "image_url", "image_url": {"url": f"sha256:{NAMES[0]}"}}
        follows = [OPENING, answer, user("more ", by_name)]
        writes(replica, "no")
        _, second, _ = await ask(session, CHAT, {"messages": follows}, headers=SESSION)
        _, events = await stream(
            session, CHAT, {**asked, "messages": [OPENING, answer, user("else")]}, headers=SESSION
        )
        (tokens, forked) = await trajectories(session)
    closed = [*SEEN, *ids_of("a cat"), EOS]
    assert second["choices"][0]["trajectory"] == {"index": 0, "turn": 1, "kept_tokens": len(closed)}
    assert tokens["token_ids"] == [
        *closed,
        *said("\n<user>more @\n<assistant>"),
        *ids_of("no"),
        EOS,
    ]
    assert sum(tokens["loss_mask"]) == len("a cat") + len("no") + 2
    assert replica.sent_images == NAMES, "each once, in however many requests"
    assert [each["images"] for each in replica.requests] == [NAMES, [*NAMES, NAMES[0]], NAMES]
    # Kept tokens have those of images, what is rendered anew has not.
    assert replica.requests[1]["token_ids"][: len(closed)] == closed
    assert replica.requests[1]["token_ids"].count(PLACE) == 2 * 2 + 1
    assert payloads(events)[0]["prompt_token_ids"] == [*closed, *said("\n<user>else\n<assistant>")]
    assert forked["token_ids"][: len(closed)] == closed


async def test_another_image_is_another_conversation(tokenizer: Path) -> None:
    async with sessions_served(tokenizer) as (replica, _, session):
        writes(replica, "x")
        await ask(session, CHAT, {"messages": [user(shown(CAT))]}, headers=SESSION)
        answer = {"role": "assistant", "content": "x"}
        follows = {"messages": [user(shown(DOG)), answer, user("on")]}
        _, other, _ = await ask(session, CHAT, follows, headers=SESSION)
    assert other["choices"][0]["trajectory"]["kept_tokens"] == 0


async def test_anthropics_and_openais_agents_send_images_too(tokenizer: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": url(CAT).partition(",")[2]}
    block = {"type": "image", "source": source}
    item = {"type": "input_image", "image_url": url(DOG)}
    async with sessions_served(tokenizer) as (replica, _, session):
        messages = {"model": "rose-policy", "messages": [user("see ", block)], "max_tokens": 4}
        writes(replica, "x")
        assert (await ask(session, MESSAGES, messages))[0] == 200
        parts = [{"type": "input_text", "text": "see "}, item]
        asked = {"model": "rose-policy", "input": [{"role": "user", "content": parts}]}
        status, first, _ = await ask(session, RESPONSES, asked, headers=SESSION)
        assert status == 200, first
        more = {"input": "more", "previous_response_id": first["id"], "model": "rose-policy"}
        status, second, _ = await ask(session, RESPONSES, more, headers=SESSION)
        assert status == 200, second
    opening = [*ids_of("<user>see "), PLACE, *ids_of("\n<assistant>")]
    assert [each["token_ids"] for each in replica.requests[:2]] == [opening] * 2
    assert [each["images"] for each in replica.requests] == [NAMES[:1], NAMES[1:], NAMES[1:]]
    assert replica.requests[2]["token_ids"][: len(said("<user>see @"))] == said("<user>see @")


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/a.png"}}, "is fetched from nowhere"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, "is no base64"),
        ({"type": "image_url", "image_url": {"url": "sha256:12"}}, "is fetched from nowhere"),
        ({"type": "image_url"}, "is fetched from nowhere"),
        ({"type": "image_url", "image_url": {"url": url(b"text")}}, "image 0 is none"),
        ({"type": "image", "source": {"type": "url", "url": "http://x"}}, "fetched from nowhere"),
        ({"type": "image_url", "image_url": {"url": f"sha256:{NAMES[0]}"}}, "is not here"),
        ({"type": "image", "sha256": NAMES[0]}, "is not here"),
        ({"type": "video_url", "video_url": {"url": url(CAT)}}, "of type 'video_url'"),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, "of type 'input_audio'"),
    ],
)
async def test_what_is_no_image_is_refused_by_name(
    tokenizer: Path, part: dict[str, Any], line: str
) -> None:
    async with sessions_served(tokenizer) as (replica, _, session):
        status, answer, _ = await ask(session, CHAT, {"messages": [user("see ", part)]})
    assert status == (428 if line == "is not here" else 400)
    assert line in answer["error"]["message"]
    assert not replica.requests


async def test_a_place_that_shows_no_image_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    tool = {"role": "tool", "tool_call_id": "c", "content": [shown(CAT)]}
    async with sessions_served(tokenizer) as (_, _, session):
        _, answer, _ = await ask(session, CHAT, {"messages": [user("x"), tool]})
    assert "a tool's message has no place for an image" in answer["error"]["message"]
    async with sessions_served(save_byte_tokenizer(tmp_path)) as (_, _, session):
        _, answer, _ = await ask(session, CHAT, {"messages": [OPENING]})
    assert "takes text has no place for an image" in answer["error"]["message"]
