import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from gateway_cases import base_url, calling, entry, gateway_with, serving, until
from hedged_cases import hedged_case
from wire_cases import ask, payloads, stream

from rose.gateway import Gateway
from rose.gateway.text_codec import TextCodec
from tests.fakes.replica import StandInReplica
from tests.harness.tokenizer_kinds import save_byte_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture
async def texty(tokenizer: Path) -> AsyncIterator[tuple[StandInReplica, Gateway]]:
    """A gateway with a tokenizer: the stand-in counts on, so the text goes on in the alphabet."""
    async with (
        StandInReplica(version=2) as replica,
        gateway_with(entry(replica, "guest-0"), tokenizer=tokenizer, max_model_len=200) as gw,
    ):
        yield replica, gw


def letters(text: str) -> list[int]:
    """Token ids of printable ASCII in the byte tokenizer: '!' is the first."""
    return [ord(letter) - ord("!") for letter in text]


async def test_token_prompts_need_no_tokenizer_and_answer_with_ids() -> None:
    async with serving() as (_, _, session):
        body = {"prompt": [[1, 10], [1, 20]], "max_tokens": 2, "n": 2, "logprobs": 0}
        _, answer, _ = await ask(session, COMPLETIONS, body)
        status, refused, _ = await ask(session, COMPLETIONS, {"prompt": "text"})
        chat, _, _ = await ask(session, CHAT, {"messages": [{"role": "user", "content": "x"}]})
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [[11, 12], [11, 12], [21, 22], [21, 22]]
    assert choices[0]["logprobs"]["tokens"] == ["token_id:11", "token_id:12"]
    assert choices[0]["logprobs"]["token_logprobs"] == [-0.011, -0.012]
    assert choices[0]["versions"] == [{"version": 0, "start": 0, "end": 2}]
    assert answer["usage"]["prompt_tokens"] == 4
    assert (status, chat) == (400, 400)
    assert "--tokenizer DIR" in refused["error"]["message"]


HEAD = "id object created model choices service_tier system_fingerprint usage"
TAIL = "kv_transfer_params ec_transfer_params metrics"
CHOICE = "finish_reason stop_reason token_ids"


@pytest.mark.parametrize(
    ("path", "prompt", "keys", "choice"),
    [
        (
            COMPLETIONS,
            {"prompt": "xyzA"},
            f"{HEAD} {TAIL}",
            f"index text logprobs {CHOICE} prompt_logprobs prompt_token_ids"
            " routed_experts versions",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi"}]},
            f"{HEAD} prompt_logprobs prompt_token_ids prompt_text {TAIL}",
            f"index message logprobs {CHOICE} routed_experts versions",
        ),
    ],
)
async def test_keys_come_in_the_order_of_vllms(
    texty: Any, path: str, prompt: dict[str, Any], keys: str, choice: str
) -> None:
    _, gw = texty
    async with aiohttp.ClientSession(base_url(gw)) as session:
        _, answer, _ = await ask(session, path, {**prompt, "max_tokens": 3})
    assert " ".join(answer) == keys
    assert " ".join(answer["choices"][0]) == choice


async def test_the_openai_client_completes_chats_and_streams(texty: Any) -> None:
    _, gw = texty
    url = f"{base_url(gw)}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        whole = await client.completions.create(
            model="rose-policy", prompt="xyzA", max_tokens=3, logprobs=1
        )
        chat = await client.chat.completions.create(
            model="rose-policy",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            logprobs=True,
        )
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="rose-policy",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=3,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
    assert whole.choices[0].text == "BCD"
    assert whole.choices[0].logprobs.tokens == ["B", "C", "D"]
    assert whole.choices[0].logprobs.text_offset == [0, 1, 2]
    # The template ends with "<assistant>", so the count goes on after ">".
    assert chat.choices[0].message.content == "?@A"
    assert [t.token for t in chat.choices[0].logprobs.content] == ["?", "@", "A"]
    assert chat.choices[0].versions == [{"version": 2, "start": 0, "end": 3}]
    text = "".join(c.choices[0].delta.content for c in chunks if c.choices)
    assert (text, chunks[0].choices[0].delta.role) == ("?@A", "assistant")
    assert chunks[-1].usage.completion_tokens == 3


async def test_a_stop_string_ends_the_turn_upstream_too(texty: Any) -> None:
    replica, gw = texty
    replica.hang_after = 6
    async with aiohttp.ClientSession(base_url(gw)) as session:
        body = {"prompt": "A", "max_tokens": 50, "stop": ["DE"], "return_token_ids": True}
        _, answer, _ = await ask(session, COMPLETIONS, body)
        _, events = await stream(session, COMPLETIONS, body)
        body = {**body, "include_stop_str_in_output": True}
        _, included, _ = await ask(session, COMPLETIONS, body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("BC", "stop", "DE")
    # The ids keep what the text leaves out, as in vLLM.
    assert choice["token_ids"] == letters("BCDE")
    assert "".join(c["choices"][0]["text"] for c in payloads(events)) == "BC"
    assert included["choices"][0]["text"] == "BCDE"
    assert replica.live == 0


async def test_text_never_splits_a_character(texty: Any) -> None:
    replica, gw = texty
    replica.script = [*letters("a"), *_ids_of("é"), *_ids_of("€")]
    async with aiohttp.ClientSession(base_url(gw)) as session:
        body = {"prompt": "A", "max_tokens": 6}
        _, events = await stream(session, COMPLETIONS, body)
    pieces = [chunk["choices"][0]["text"] for chunk in payloads(events)]
    assert "".join(pieces) == "aé€"
    assert not any("�" in piece for piece in pieces)


async def test_tokenize_and_detokenize_are_each_others_inverse(texty: Any) -> None:
    _, gw = texty
    async with aiohttp.ClientSession(base_url(gw)) as session:
        body = {"prompt": "AB", "return_token_strs": True}
        _, tokens, _ = await ask(session, "/tokenize", body)
        _, text, _ = await ask(session, "/detokenize", {"tokens": tokens["tokens"]})
        messages = [{"role": "user", "content": "x"}]
        _, chat, _ = await ask(session, "/tokenize", {"messages": messages})
        wrong, _, _ = await ask(session, "/tokenize", {"prompt": "a", "messages": messages})
    assert tokens == {
        "count": 2,
        "max_model_len": 200,
        "tokens": letters("AB"),
        "token_strs": ["A", "B"],
    }
    assert text == {"prompt": "AB"}
    assert chat["tokens"] == letters("<user>x<assistant>")
    assert wrong == 400


def _ids_of(letter: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ((written, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)
    return [alphabet.index(char) for char in written]


async def test_a_second_copy_keeps_the_text_and_its_stop_strings(tokenizer: Path) -> None:
    async with hedged_case(tokenizer=tokenizer, max_model_len=200) as case:
        # The stand-ins count on from '"' to the stop, of which the copy has seen none or half.
        body = {"prompt": [1, 33], "max_tokens": 24, "stop": "OPQ", "group_id": "g"}
        body |= {"group_size": 2, "hedges": 1, "logprobs": 0, "return_token_ids": True}
        case.table(slow=None)
        first = asyncio.create_task(ask(case.http, COMPLETIONS, {**body, "request_id": "a"}))
        await until(lambda: case.stats.tokens["own-slow"] >= 2)
        case.table(slow=None, fast=None)
        _, alone, _ = await ask(case.http, COMPLETIONS, {**body, "request_id": "b"})
        _, copied, _ = await first
    assert case.stats.hedge_wins == 1
    (one,), (two,) = alone["choices"], copied["choices"]
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason"):
        assert two[name] == one[name]
    assert one["stop_reason"] == "OPQ"
    assert one["text"]


async def test_retokenisation_drift_what_continues_is_the_sampled_tokens_never_their_text(
    tokenizer: Path,
) -> None:
    """Half a character is no text: encoded again, it would be other tokens."""
    alphabet = TextCodec(tokenizer)
    half, other_half = (await alphabet.encode(["é"]))[0]
    script = [half, half, other_half, other_half, half]
    (again,) = await alphabet.encode([alphabet.decode(script[:2])])
    assert again != script[:2], "this text would not survive"
    async with StandInReplica() as guest, StandInReplica() as dedicated:
        guest.script, guest.revoke_after = script, 2
        dedicated.script = script[2:]
        rows = entry(guest, "guest-0", decode_tok_s=9e5), entry(dedicated, "own-0")
        async with calling(*rows, tokenizer=tokenizer, max_model_len=200) as (_, session):
            body = {"prompt": "AB", "max_tokens": len(script), "return_token_ids": True}
            _, answer, _ = await ask(session, COMPLETIONS, body)
            prompt = [*((await alphabet.encode(["AB"]))[0]), *script]
            _, longer, _ = await ask(session, COMPLETIONS, {**body, "prompt": prompt})
    assert answer["choices"][0]["token_ids"] == script
    assert dedicated.requests[0]["token_ids"] == prompt[:4]
    # A trajectory that goes on from token ids goes on from exactly those.
    asked = [*guest.requests, *dedicated.requests]
    assert prompt in [request["token_ids"] for request in asked]
    assert longer["usage"]["prompt_tokens"] == len(prompt)
