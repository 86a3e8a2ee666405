"""Conversations and long texts cost their caller a 400, never the other turns a pause."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rose.gateway import Gateway
from rose.gateway.event_loop import LoopLag
from rose.gateway.text_codec import TextCodec
from tests.harness.tokenizer_kinds import TEMPLATE, save_byte_tokenizer
from tests.unit.gateway.gateway_cases import calling, serving
from tests.unit.gateway.wire_cases import CHAT, VLLM, ask, body_of, vllm_body

# One gateway for all, whose processes for texts take a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")
# A template as bad as can be: it goes round, or makes text, as often as a variable of it says.
GREEDY = (
    "{% for i in range(spin or 0) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% if size %}{{ 'a' * size }}{% endif %}"
    "{% if fail %}{{ raise_exception('not so') }}{% endif %}"
)


# Slow work has little time; everything else has plenty, on a busy machine too.
HURRIED_S, PATIENT_S = 0.3, 30.0


@contextmanager
def hurried(gateway: Gateway) -> Iterator[None]:
    """Texts may take `HURRIED_S` only within the block."""
    assert gateway._codec is not None
    pool = gateway._codec._pool
    pool.time_s = HURRIED_S
    try:
        yield
    finally:
        pool.time_s = PATIENT_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(GREEDY + TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texty(tokenizer: Path) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    limits = {"text_timeout_s": PATIENT_S, "max_prompt_chars": 100_000, "max_model_len": 1_000_000}
    async with serving(tokenizer=tokenizer, **limits) as (_, gw, session):
        yield gw, session


def chat(**fields: Any) -> dict[str, Any]:
    return body_of(CHAT, 2, **fields)


@contextmanager
def longest_pause_s() -> Iterator[list[float]]:
    """The event loop's longest pause within the block, as the list's one element.

    Of its own doing: a busy machine may keep the whole process from running.
    """
    found = [0.0]

    class Kept(LoopLag):
        def note(self, lag_s: float, busy_s: float) -> None:
            del lag_s
            found[0] = max(found[0], busy_s)

    task = asyncio.create_task(Kept().watch())
    try:
        yield found
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"spin": 99_999}, "takes longer than 0.3 s"),
        ({"size": 10**12}, "memory"),
        ({"size": 3 * 10**9}, "memory"),
        ({"size": 10**6}, "longer than 100000 characters"),
        ({"fail": True}, "not so"),
    ],
)
async def test_a_conversation_that_costs_too_much_is_refused_alone(
    texty: Any, variables: dict[str, int], says: str
) -> None:
    gw, session = texty
    assert (await ask(session, CHAT, chat()))[0] == 200
    hurry = hurried(gw) if "spin" in variables else nullcontext()
    with longest_pause_s() as pause, hurry:
        costly = asyncio.create_task(ask(session, CHAT, chat(chat_template_kwargs=variables)))
        while not costly.done():
            assert (await ask(session, VLLM, vllm_body(2)))[0] == 200
            await asyncio.sleep(0.02)
    status, answer, _ = await costly
    assert (status, says in answer["error"]["message"]) == (400, True), answer
    # Its worker is there again, or the neighbour is.
    assert (await ask(session, CHAT, chat()))[0] == 200
    assert pause[0] < 1.0


async def test_a_variable_of_the_template_reaches_it(texty: Any) -> None:
    session = texty[1]
    plain = (await ask(session, "/tokenize", chat()))[1]
    more = (await ask(session, "/tokenize", chat(chat_template_kwargs={"size": 7})))[1]
    assert more["count"] == plain["count"] + 7


async def test_long_texts_are_the_same_as_short_ones(texty: Any) -> None:
    session = texty[1]
    text = "abc é" * 5_000
    _, found, _ = await ask(session, "/tokenize", {"prompt": text, "return_token_strs": True})
    _, quick, _ = await ask(session, "/tokenize", {"prompt": text})
    _, back, _ = await ask(session, "/detokenize", {"tokens": found["tokens"]})
    assert found["tokens"] == quick["tokens"]
    assert len(found["token_strs"]) == found["count"] == len(text.encode())
    assert back["prompt"] == text


async def test_those_beyond_the_queue_are_told_to_come_back(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.tokenizer_pool.pool.MAX_QUEUE", 1)
    async with calling(tokenizer=tokenizer, text_timeout_s=PATIENT_S) as (gw, session):
        await ask(session, "/tokenize", chat())
        slow = chat(chat_template_kwargs={"spin": 99_999})
        with hurried(gw):
            found = await asyncio.gather(*(ask(session, "/tokenize", slow) for _ in range(8)))
        assert (await ask(session, "/tokenize", chat()))[0] == 200
    statuses = [status for status, _, _ in found]
    assert set(statuses) == {400, 429}
    assert all("Retry-After" in headers for status, _, headers in found if status == 429)


async def test_a_caller_that_hangs_up_leaves_the_worker_to_others(tokenizer: Path) -> None:
    codec = TextCodec(tokenizer)
    try:
        await codec.encode(["x" * 9_000])
        hung_up = asyncio.create_task(codec.encode(["y" * 90_000]))
        await asyncio.sleep(0)
        hung_up.cancel()
        assert len((await codec.encode(["z" * 9_000]))[0]) == 9_000
    finally:
        await codec.close()
