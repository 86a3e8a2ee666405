from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from rose.gateway import Gateway
from rose.gateway.text_codec import TextCodec
from tests.fakes.replica import StandInReplica
from tests.harness.tokenizer_kinds import ids_of, save_byte_tokenizer
from tests.unit.gateway.gateway_cases import base_url, begin, failing_over, serving, until
from tests.unit.gateway.hedged_cases import hedged_case
from tests.unit.gateway.wire_cases import CHAT, COMPLETIONS, ask, body_of, payloads, stream

# One gateway for all, whose processes for texts take a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: Path) -> AsyncIterator[tuple[StandInReplica, Gateway, Any]]:
    limits = {"tokenizer": tokenizer, "max_model_len": 200}
    async with serving(StandInReplica(version=2), **limits) as served:
        yield served


@pytest.fixture
def texty(served: Any) -> Any:
    """A gateway with a tokenizer: the stand-in counts on, so the text goes on in the alphabet."""
    served[0].hang_after, served[0].script = None, []
    return served


async def test_token_prompts_need_no_tokenizer_and_answer_with_ids() -> None:
    async with serving() as (_, _, session):
        body = {"prompt": [[1, 10], [1, 20]], "max_tokens": 2, "n": 2, "logprobs": 0}
        _, answer, _ = await ask(session, COMPLETIONS, body)
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [[11, 12], [11, 12], [21, 22], [21, 22]]
    assert choices[0]["logprobs"]["tokens"] == ["token_id:11", "token_id:12"]
    assert choices[0]["logprobs"]["token_logprobs"] == [-0.011, -0.012]
    assert choices[0]["versions"] == [{"version": 0, "start": 0, "end": 2}]
    assert answer["usage"]["prompt_tokens"] == 4


HEAD = "id object created model choices service_tier system_fingerprint usage"
TAIL = "kv_transfer_params ec_transfer_params metrics"
END = "finish_reason stop_reason token_ids"
OF_TEXT = f"index text logprobs {END} prompt_logprobs prompt_token_ids routed_experts versions"
OF_CHAT = f"index message logprobs {END} routed_experts versions"
PROMPT_KEYS = "prompt_logprobs prompt_token_ids prompt_text"


@pytest.mark.parametrize(
    ("path", "body", "keys", "choice"),
    [
        (COMPLETIONS, {"prompt": "xyzA"}, f"{HEAD} {TAIL}", OF_TEXT),
        (CHAT, body_of(CHAT), f"{HEAD} {PROMPT_KEYS} {TAIL}", OF_CHAT),
    ],
)
async def test_keys_come_in_the_order_of_vllms(
    texty: Any, path: str, body: dict[str, Any], keys: str, choice: str
) -> None:
    _, answer, _ = await ask(texty[2], path, {**body, "max_tokens": 3})
    assert " ".join(answer) == keys
    assert " ".join(answer["choices"][0]) == choice


async def test_the_openai_client_completes_chats_and_streams(texty: Any) -> None:
    url = f"{base_url(texty[1])}/v1"
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        whole = await client.completions.create(
            model="rose-policy", prompt="xyzA", max_tokens=3, logprobs=1
        )
        chat = await client.chat.completions.create(model="rose-policy", logprobs=True, **asked)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="rose-policy", stream=True, stream_options={"include_usage": True}, **asked
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
    replica, _, session = texty
    replica.hang_after = 6
    body = {"prompt": "A", "max_tokens": 50, "stop": ["DE"], "return_token_ids": True}
    _, answer, _ = await ask(session, COMPLETIONS, body)
    _, events = await stream(session, COMPLETIONS, body)
    body = {**body, "include_stop_str_in_output": True}
    _, included, _ = await ask(session, COMPLETIONS, body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("BC", "stop", "DE")
    # The ids keep what the text leaves out, as in vLLM.
    assert choice["token_ids"] == ids_of("BCDE")
    assert "".join(c["choices"][0]["text"] for c in payloads(events)) == "BC"
    assert included["choices"][0]["text"] == "BCDE"
    await until(lambda: replica.live == 0)
    # Events that come one by one, as a replica's do, repeat nothing when the stop string is whole.
    replica.delay_s = 0.02
    del body["include_stop_str_in_output"]
    _, events = await stream(session, COMPLETIONS, body)
    replica.delay_s = 0.0
    assert "".join(c["choices"][0]["text"] for c in payloads(events)) == "BC"


async def test_text_never_splits_a_character(texty: Any) -> None:
    replica, _, session = texty
    replica.script = ids_of("aé€")
    body = {"prompt": "A", "max_tokens": 6}
    _, events = await stream(session, COMPLETIONS, body)
    pieces = [chunk["choices"][0]["text"] for chunk in payloads(events)]
    assert "".join(pieces) == "aé€"
    assert not any("�" in piece for piece in pieces)


async def test_tokenize_and_detokenize_are_each_others_inverse(texty: Any) -> None:
    session = texty[2]
    body = {"prompt": "AB", "return_token_strs": True}
    _, tokens, _ = await ask(session, "/tokenize", body)
    _, text, _ = await ask(session, "/detokenize", {"tokens": tokens["tokens"]})
    _, chat, _ = await ask(session, "/tokenize", body_of(CHAT))
    assert tokens == {
        "count": 2,
        "max_model_len": 200,
        "tokens": ids_of("AB"),
        "token_strs": ["A", "B"],
    }
    assert text == {"prompt": "AB"}
    assert chat["tokens"] == ids_of("<user>x<assistant>")


async def test_a_second_copy_keeps_the_text_and_its_stop_strings(tokenizer: Path) -> None:
    async with hedged_case(tokenizer=tokenizer, max_model_len=200) as case:
        # The stand-ins count on from '"' to the stop, of which the copy has seen none or half.
        body = {"prompt": [1, 33], "max_tokens": 24, "stop": "OPQ", "group_id": "g"}
        body |= {"group_size": 2, "hedges": 1, "logprobs": 0, "return_token_ids": True}
        case.table("slow")
        first = begin(case.http, {**body, "request_id": "a"}, COMPLETIONS)
        await until(lambda: case.stats.tokens["own-slow"] >= 2)
        case.table("slow", "fast")
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
    limits = {"tokenizer": tokenizer, "max_model_len": 200}
    async with failing_over(**limits) as (guest, dedicated, _, session):
        guest.script, guest.revoke_after = script, 2
        dedicated.script = script[2:]
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
